#include "timeline.hpp"

#include <algorithm>

namespace lowtide {
namespace {

Index slot_count(const Graph& graph, Index length) {
    const Index slots = 16 * std::max(length, graph.nodes + 1) + 512;
    return (slots + Profile::block_slots - 1) / Profile::block_slots * Profile::block_slots;
}

}  // namespace

Timeline::Timeline(const Graph& graph, Index length, Index repeats)
    : graph_(graph),
      repeats_(repeats),
      node_at_(slot_count(graph, length), -1),
      slots_(static_cast<std::size_t>(graph.nodes + 1) * repeats),
      computes_(graph.nodes + 1),
      place_(node_at_.size()),
      profile_(size()) {}

bool Timeline::has_room(Index node) const {
    const bool full = 2 * (std::ssize(recomputes_) + graph_.nodes) > size();
    return !full && computes_[node] < repeats_;
}

Index Timeline::before(Index node, Index slot) const {
    Index index = computes_[node] - 1;
    while (index >= 0 && slot_of(node, index) >= slot) --index;
    return index;
}

Index Timeline::compute_after(Index node, Index index) const {
    return index + 1 < computes_[node] ? slot_of(node, index + 1) : size();
}

// The slot of the node's last compute before `high`, -1 without one.
Index Timeline::last_before(Index node, Index high) const {
    const Index index = before(node, high);
    return index < 0 ? -1 : slot_of(node, index);
}

Index Timeline::last_use(Index storage, Index low, Index high) const {
    Index latest = low;
    for (Index reader : graph_.uses[storage]) latest = std::max(latest, last_before(reader, high));
    return latest;
}

Index Timeline::next_use(Index node, Index low) const {
    Index earliest = size();
    for (Index storage : graph_.owns[node]) {
        for (Index reader : graph_.uses[storage]) {
            Index index = 0;
            while (index < computes_[reader] && slot_of(reader, index) <= low) ++index;
            if (index < computes_[reader]) earliest = std::min(earliest, slot_of(reader, index));
        }
    }
    return earliest;
}

bool Timeline::used(Index node, Index slot) const {
    const Index high = compute_after(node, before(node, slot + 1));
    return std::ranges::any_of(graph_.owns[node], [&](Index storage) {
        return !graph_.held[storage] && last_use(storage, slot, high) > slot;
    });
}

Index Timeline::step_before(Index slot) const {
    --slot;
    while (slot >= 0 && node_at_[slot] < 0) --slot;
    return slot;
}

Index Timeline::step_from(Index slot) const {
    while (node_at_[slot] < 0) ++slot;
    return slot;
}

// Whether a step strictly between needs the view.
bool Timeline::view_needed(Index view, Index low, Index high) const {
    return std::ranges::any_of(graph_.needers[view], [&](Index reader) { return last_before(reader, high) > low; });
}

bool Timeline::reads(Index node, Index storage) const {
    return std::ranges::find(graph_.reads[node], storage) != graph_.reads[node].end();
}

// The end of the storage's life around the slot were the change made (`none`: as things are).
Index Timeline::life_end(Index storage, Index slot, const Change& change) const {
    const Index base = graph_.storage_node[storage];
    const Index index = before(base, slot);
    const Index low = slot_of(base, index);
    Index high = compute_after(base, index);
    const bool around = change.node >= 0 && low < change.slot && change.slot < high;
    if (around && base == change.node && slot < change.slot) high = change.slot;
    const Index end = last_use(storage, low, high);
    return around && reads(change.node, storage) ? std::max(end, change.slot) : end;
}

// Whether the reader's compute at the slot writes over what ends there, see `life_end`.
bool Timeline::overwrites(Index reader, Index slot, const Change& change) const {
    for (Index storage : graph_.overs[reader]) {
        if (life_end(storage, slot, change) == slot) {
            return slot == first_slot(reader) || !graph_.held[graph_.first_own(reader)];
        }
    }
    return false;
}

// Bytes at the end of a life of the storage, which the change moves to there or away.
void Timeline::move_overwrite(Index storage, Index end, const Change& change) {
    const Index reader = node_at_[end];
    for (Index other : graph_.overs[reader]) {
        const bool ends = life_end(other, end, none) == end;
        if (ends == (life_end(other, end, change) == end)) continue;
        const bool was = overwrites(reader, end, none);
        if (other == storage && was != overwrites(reader, end, change)) {
            const Number own = graph_.storage_bytes[graph_.first_own(reader)];
            profile_.add(end, end, was ? change.sign * own : -change.sign * own);
        }
        return;  // of several whose ends move, the first stands for all
    }
}

void Timeline::apply(const Change& change) {
    const auto [node, slot, sign] = change;
    Number here = graph_.workspace_bytes[node];
    Number time = graph_.time_ns[node] + extend_reads(change);
    time += renew_owns(change, here);
    if (graph_.random[node] && graph_.rng_state_bytes > 0) {
        const Index last = slot_of(node, computes_[node] - 1);
        profile_.add(computes_[node] == 1 ? last : last + 1, slot, sign * graph_.rng_state_bytes);
    }
    if (graph_.overs.size(node) > 0 && overwrites(node, slot, change)) {
        here -= graph_.storage_bytes[graph_.first_own(node)];
    }
    profile_.add(slot, slot, sign * here);
    recompute_ns_ += sign * time;
}

// What the node reads lives on to the slot; the time of views that only it needs.
Number Timeline::extend_reads(const Change& change) {
    const auto [node, slot, sign] = change;
    for (Index storage : graph_.reads[node]) {
        if (graph_.held[storage]) continue;
        const Index base = graph_.storage_node[storage];
        const Index index = before(base, slot);
        const Index end = last_use(storage, slot_of(base, index), compute_after(base, index));
        profile_.add(end + 1, slot, sign * graph_.storage_bytes[storage]);
        if (end < slot && graph_.overwritten[storage]) move_overwrite(storage, end, change);
    }
    Number time = 0;
    for (Index view : graph_.needs[node]) {
        const Index storage = graph_.view_storage[view];
        const Index base = graph_.storage_node[storage];
        const bool held = graph_.held[storage];
        const Index index = held ? 0 : before(base, slot);
        const Index high = held ? size() : compute_after(base, index);
        if (!view_needed(view, slot_of(base, index), high)) time += graph_.view_time_ns[view];
    }
    return time;
}

// What the node allocates is cut at the last use before the slot, or adds to the bytes `here`, in the slot itself; the time
// of views that are needed before and after.
Number Timeline::renew_owns(const Change& change, Number& here) {
    const auto [node, slot, sign] = change;
    const Index index = before(node, slot);
    const Index low = slot_of(node, index);
    const Index high = compute_after(node, index);
    Number time = 0;
    for (Index storage : graph_.owns[node]) {
        if (graph_.held[storage] || last_use(storage, low, high) < slot) {
            here += graph_.storage_bytes[storage];
            continue;
        }
        const Index end = last_use(storage, low, slot);
        profile_.add(end + 1, slot - 1, -sign * graph_.storage_bytes[storage]);
        if (graph_.overwritten[storage]) move_overwrite(storage, end, change);
        for (Index view : graph_.views[storage]) {
            if (view_needed(view, low, slot) && view_needed(view, slot, high)) time += graph_.view_time_ns[view];
        }
    }
    return time;
}

void Timeline::insert(Index node, Index slot) {
    apply({node, slot, 1});
    put(node, slot);
}

void Timeline::remove(Index node, Index slot) {
    take(node, slot);
    apply({node, slot, -1});
}

void Timeline::put(Index node, Index slot) {
    Index index = computes_[node]++;
    for (; slot_of(node, index - 1) > slot; --index) slot_entry(node, index) = slot_of(node, index - 1);
    slot_entry(node, index) = slot;
    node_at_[slot] = node;
    place_[slot] = static_cast<Index>(recomputes_.size());
    recomputes_.push_back(slot);
}

void Timeline::take(Index node, Index slot) {
    const auto begin = slots_.begin() + node * repeats_;
    const auto end = begin + computes_[node]--;
    const auto found = std::find(begin, end, slot);
    std::copy(found + 1, end, found);
    node_at_[slot] = -1;
    const Index last = recomputes_.back();
    recomputes_[place_[slot]] = last;
    place_[last] = place_[slot];
    recomputes_.pop_back();
}

std::vector<Index> Timeline::codes() const {
    std::vector<Index> codes;
    for (Index slot = 0; slot < size(); ++slot) {
        const Index node = node_at_[slot];
        if (node >= 0) codes.push_back(first_slot(node) == slot ? node : ~node);
    }
    return codes;
}

void Timeline::load(Indices codes) {
    std::ranges::fill(node_at_, -1);
    std::ranges::fill(computes_, 0);
    recomputes_.clear();
    recompute_ns_ = 0;
    for (std::size_t i = 0; i < codes.size(); ++i) {
        const Index node = node_of(codes[i]);
        const Index slot = static_cast<Index>((i + 1) * (node_at_.size() - 1) / codes.size());
        node_at_[slot] = node;
        slot_entry(node, computes_[node]++) = slot;
        if (codes[i] >= 0) continue;
        place_[slot] = static_cast<Index>(recomputes_.size());
        recomputes_.push_back(slot);
        recompute_ns_ += graph_.time_ns[node];
    }
    measure();
    for (Index view = 0; view < graph_.view_count(); ++view) {
        recompute_ns_ += graph_.view_time_ns[view] * lives_with(view);
    }
}

// In how many lives of its storage a view is needed.
Number Timeline::lives_with(Index view) const {
    const Index storage = graph_.view_storage[view];
    if (storage < 0) return 0;  // of something outside
    const Index base = graph_.storage_node[storage];
    if (graph_.held[storage]) return view_needed(view, first_slot(base), size()) ? 1 : 0;
    Number lives = 0;
    for (Index index = 0; index < computes_[base]; ++index) {
        if (view_needed(view, slot_of(base, index), compute_after(base, index))) ++lives;
    }
    return lives;
}

// Bytes over time from scratch.
void Timeline::measure() {
    std::vector<Number> at(size());         // bytes in one slot only
    std::vector<Number> rises(size() + 1);  // of the bytes that stay
    for (Index storage = 0; storage < graph_.storages(); ++storage) measure_storage(storage, at, rises);
    for (Index node = 0; node <= graph_.nodes; ++node) measure_node(node, at, rises);
    Number resident = 0;
    for (Index slot = 0; slot < size(); ++slot) {
        resident += rises[slot];
        at[slot] += resident;
    }
    profile_.assign(at);
}

void Timeline::measure_storage(Index storage, std::vector<Number>& at, std::vector<Number>& rises) const {
    const Index base = graph_.storage_node[storage];
    const bool held = graph_.held[storage];
    const Number bytes = graph_.storage_bytes[storage];
    for (Index index = 0; index < computes_[base]; ++index) {
        const Index first = slot_of(base, index);
        if (held && index > 0) {
            at[first] += bytes;
            continue;
        }
        const Index last = held ? size() - 1 : last_use(storage, first, compute_after(base, index));
        rises[first] += bytes;
        rises[last + 1] -= bytes;
    }
}

void Timeline::measure_node(Index node, std::vector<Number>& at, std::vector<Number>& rises) const {
    for (Index index = 0; index < computes_[node]; ++index) {
        const Index slot = slot_of(node, index);
        at[slot] += graph_.workspace_bytes[node];
        if (overwrites(node, slot, none)) at[slot] -= graph_.storage_bytes[graph_.first_own(node)];
    }
    if (graph_.random[node] && computes_[node] > 1) {
        rises[first_slot(node)] += graph_.rng_state_bytes;
        rises[slot_of(node, computes_[node] - 1) + 1] -= graph_.rng_state_bytes;
    }
}

}  // namespace lowtide
