#include "moves.hpp"

#include <algorithm>

namespace lowtide {
namespace {

constexpr Index spread = 16;  // slots per step, about
constexpr Index group = 64;   // repeats that a group move takes; a loop over a sequence has thousands
constexpr Index longest_run = 16, farthest = 12;  // of runs that move: recomputes, and steps that they pass
constexpr Index looks = 64;   // at random nodes, for those that are there at the peak

}  // namespace

bool Moves::next(bool rejected, Number coin, bool relieving, bool tight) {
    if (rejected) {
        edits_.take_back();
    } else {
        edits_.accept();
    }
    bool complete = false;  // what is asked for needs nothing else
    if (relieving && below(3) == 0) {
        relieve_peak();
    } else {
        complete = propose(tight);
    }
    return edits_.carry_out(complete ? 0 : coin);
}

bool Moves::propose(bool tight) {
    const Index draw = below(100);
    if (tight && 81 <= draw && draw < 85) {
        shift_run();
        return true;
    }
    if (draw < 58) insert_before_use();
    if (49 <= draw && draw < 71) {
        remove_one();  // from 49 to 57 together with the insertion: a swap
    } else if (71 <= draw && draw < 74) {
        remove_run();
    } else if (74 <= draw && draw < 85) {
        shift();
    } else if (85 <= draw && draw < 91) {
        step_down();
    } else if (91 <= draw && draw < 98) {
        insert_in_group();
    } else if (draw >= 98) {
        remove_in_group();
    }
    return false;
}

// A slot, -1 where nothing is recomputed; mostly the end of a run of recomputes, for which the others were made.
Index Moves::random_recompute() {
    const Indices recomputes = line_.recomputes();
    if (recomputes.empty()) return -1;
    Index slot = recomputes[below(static_cast<Index>(recomputes.size()))];
    if (below(4) != 0) {
        Index following = line_.step_from(slot + 1);
        while (line_.is_recompute(following)) {
            slot = following;
            following = line_.step_from(slot + 1);
        }
    }
    return slot;
}

// A step and something that it reads and that could be recomputed before it. Mostly a first compute that has not been near
// what it reads for long, else any step.
std::optional<Moves::Read> Moves::random_read() {
    Index slot, storage;
    if (below(4) != 0 && !graph_.gaps.empty()) {
        const Index read = graph_.gaps[below(static_cast<Index>(graph_.gaps.size()))];
        slot = line_.first_slot(graph_.read_node[read]);
        storage = graph_.reads.entries[read];
    } else {
        const Indices recomputes = line_.recomputes();
        const Index pick = below(graph_.nodes + 1 + static_cast<Index>(recomputes.size()));
        slot = pick <= graph_.nodes ? line_.first_slot(pick) : recomputes[pick - graph_.nodes - 1];
        const Indices reads = graph_.reads[line_.node_at(slot)];
        if (reads.empty()) return std::nullopt;
        storage = reads[below(static_cast<Index>(reads.size()))];
    }
    const Index base = graph_.storage_node[storage];
    const Index previous = line_.step_before(slot);
    const bool possible = graph_.recomputable[base] && !graph_.held[storage] && previous >= 0;
    if (!possible || line_.node_at(previous) == base) return std::nullopt;
    return Read{slot, base};
}

// The first of the run of recomputes that ends just before the slot (the slot itself without one).
Index Moves::chunk_start(Index slot) const {
    Index previous = line_.step_before(slot);
    while (previous >= 0 && line_.is_recompute(previous)) {
        slot = previous;
        previous = line_.step_before(slot);
    }
    return slot;
}

// Recompute what a random step reads just before it, or before the recomputes that precede it.
void Moves::insert_before_use() {
    const auto read = random_read();
    if (!read) return;
    Index slot = read->slot;
    if (below(4) == 0) {
        const Index earlier = chunk_start(slot);
        if (line_.slot_of(read->node, line_.before(read->node, slot)) >= earlier) return;
        slot = earlier;
    }
    edits_.ask_insert(read->node, slot);
}

// The members of the node's class, or those around it where there are many.
Indices Moves::group_around(Index node) {
    const Indices members = classes_.members[classes_.number[node]];
    const Index count = static_cast<Index>(members.size());
    if (count <= group) return members;
    const Index size = group >> below(4);
    const Index place = static_cast<Index>(std::ranges::lower_bound(members, node) - members.begin());
    const Index first = std::min(std::max(place - below(size), 0), count - size);
    return members.subspan(first, size);
}

// As `insert_before_use`, for the same read of every step of the same class.
void Moves::insert_in_group() {
    const auto read = random_read();
    if (!read) return;
    const Index index = line_.is_recompute(read->slot) ? 1 : 0;
    const Index kind = classes_.number[read->node];
    for (Index member : group_around(line_.node_at(read->slot))) {
        if (index >= line_.computes(member)) continue;
        const Index at = line_.slot_of(member, index);
        for (Index storage : graph_.reads[member]) {
            const Index base = graph_.storage_node[storage];
            if (classes_.number[base] != kind || !graph_.recomputable[base] || graph_.held[storage]) continue;
            const Index previous = line_.step_before(at);
            if (previous >= 0 && line_.node_at(previous) != base) edits_.ask_insert(base, at);
            break;
        }
    }
}

void Moves::remove_one() {
    const Index slot = random_recompute();
    if (slot >= 0) edits_.ask_remove(slot);
}

// Remove a few consecutive recomputes.
void Moves::remove_run() {
    Index slot = random_recompute();
    for (Index left = 2 + below(4); slot >= 0 && left > 0 && line_.is_recompute(slot); --left) {
        edits_.ask_remove(slot);
        slot = line_.step_before(slot);
    }
}

// Remove every recompute of a group.
void Moves::remove_in_group() {
    const Index slot = random_recompute();
    if (slot < 0) return;
    for (Index member : group_around(line_.node_at(slot))) {
        for (Index index = 1; index < line_.computes(member); ++index) edits_.ask_remove(line_.slot_of(member, index));
    }
}

// Move a recompute: to just before its next use or the use after that, or a random distance either way.
void Moves::shift() {
    const Index slot = random_recompute();
    if (slot < 0) return;
    const Index node = line_.node_at(slot);
    const Index size = line_.size();
    Index goal;
    if (below(2) == 0) {
        const Index distance = spread << below(7);
        const Index earliest = line_.slot_of(node, line_.before(node, slot)) + 1;
        goal = slot + below(2 * distance + 1) - distance;
        goal = line_.step_from(std::min(std::max(goal, earliest), size - 1));
    } else {
        goal = line_.next_use(node, slot);
        if (goal < size && below(2) == 0) {
            const Index later = line_.next_use(node, goal);
            goal = later < size ? later : goal;
        }
    }
    if (goal < size && goal != slot) {
        edits_.ask_insert(node, goal);
        edits_.ask_remove(slot);
    }
}

// Move consecutive recomputes together past a few of the steps before or after them: what they need and what they make then
// stands beside other things, while one of them alone would only keep more.
void Moves::shift_run() {
    const Index last = random_recompute();
    if (last < 0) return;
    Index first = last;
    Index previous = line_.step_before(first);
    for (Index left = below(longest_run); left > 0 && previous >= 0 && line_.is_recompute(previous); --left) {
        first = previous;
        previous = line_.step_before(first);
    }
    const bool earlier = below(2) == 0;
    Index goal = earlier ? first : line_.step_from(last + 1);
    for (Index left = 1 + below(farthest); left > 0; --left) {
        const Index next = earlier ? line_.step_before(goal) : goal + 1;
        if (next < 0 || next >= line_.size()) return;
        goal = earlier ? next : line_.step_from(next);
    }
    for (Index slot = last;; slot = line_.step_before(slot)) {
        edits_.ask_remove(slot);
        if (slot == first) break;
    }
    for (Index slot = last;; slot = line_.step_before(slot)) {
        edits_.ask_insert(line_.node_at(slot), goal);
        if (slot == first) break;
    }
}

// Keep the result of a recompute by recomputing one of its inputs instead, or one of its readers.
void Moves::step_down() {
    const Index slot = random_recompute();
    if (slot < 0) return;
    Index at = 0;
    const Index other = random_neighbour(line_.node_at(slot), slot, at);
    if (other >= 0 && graph_.recomputable[other] && at < line_.size() && line_.first_slot(other) < at) {
        edits_.ask_insert(other, at);
    }
    edits_.ask_remove(slot);
}

// Recompute something after the peak that is there only for a later use: of the first two that are found, what takes more.
void Moves::relieve_peak() {
    const Index peak = line_.profile().peak_slot();
    Index chosen = -1, before_use = 0;
    Number most = -1;
    for (Index look = 0, found = 0; look < looks && found < 2; ++look) {
        const Index node = below(graph_.nodes);
        if (!graph_.recomputable[node] || line_.first_slot(node) >= peak) continue;
        const Index use = line_.next_use(node, peak);
        if (use >= line_.compute_after(node, line_.before(node, peak))) continue;
        ++found;
        Number bytes = 0;
        for (Index storage : graph_.owns[node]) bytes += graph_.storage_bytes[storage];
        if (bytes > most) {
            most = bytes;
            chosen = node;
            before_use = use;
        }
    }
    if (chosen >= 0) edits_.ask_insert(chosen, before_use);
}

// An input or a reader of the node, -1 without one, and `at`, the slot before which it would be recomputed.
Index Moves::random_neighbour(Index node, Index slot, Index& at) {
    if (below(2) == 0) {
        const Indices reads = graph_.reads[node];
        if (reads.empty()) return -1;
        const Index storage = reads[below(static_cast<Index>(reads.size()))];
        at = line_.step_from(slot + 1);
        return graph_.held[storage] ? -1 : graph_.storage_node[storage];
    }
    const Indices users = graph_.uses[graph_.first_own(node)];
    if (users.empty()) return -1;
    const Index other = users[below(static_cast<Index>(users.size()))];
    at = line_.next_use(other, slot);
    return other;
}

}  // namespace lowtide
