#include "edits.hpp"

#include <algorithm>

namespace lowtide {

void Edits::ask(const Edit& edit) {
    if (asked_.size() < most_edits) asked_.push_back(edit);
}

bool Edits::carry_out(Number coin) {
    while (const auto edit = next(coin)) {
        if (journal_.size() == most_edits) break;
        journal_.push_back(*edit);
        apply(*edit);
        note_neighbours(*edit);
    }
    asked_.clear();
    pending_.clear();
    front_ = -1;
    return !journal_.empty();
}

void Edits::take_back() {
    for (; !journal_.empty(); journal_.pop_back()) {
        const auto [node, slot, inserts] = journal_.back();
        apply({node, slot, !inserts});
    }
}

void Edits::spread_anew() {
    line_.load(line_.codes());
    journal_.clear();
    cramped_ = 0;
}

void Edits::apply(const Edit& edit) {
    if (edit.inserts) {
        line_.insert(edit.node, edit.slot);
    } else {
        line_.remove(edit.node, edit.slot);
    }
}

// Remember to look whether a recompute is still used: the node's last compute before the slot.
void Edits::note(Index node, Index slot) {
    const Index index = line_.before(node, slot);
    if (index > 0 && pending_.size() < most_edits) pending_.push_back({node, line_.slot_of(node, index)});
}

// Whoever may have lost the last use by the edit.
void Edits::note_neighbours(const Edit& edit) {
    if (edit.inserts) {
        note(edit.node, edit.slot);
        note(edit.node, edit.slot + 1);
        return;
    }
    for (Index storage : line_.graph().reads[edit.node]) note(line_.graph().storage_node[storage], edit.slot);
}

// What is to be done next for the present move: the lazy closure of the last insertion, then what was asked for, then
// recomputes that have become useless.
std::optional<Edits::Edit> Edits::next(Number coin) {
    if (const auto edit = next_of_closure(coin)) return edit;
    front_ = -1;
    if (const auto edit = next_asked(coin)) return edit;
    return next_useless();
}

std::optional<Edits::Edit> Edits::next_of_closure(Number coin) {
    while (front_ >= 0 && coin > 0) {
        if (line_.node_at(front_ - 1) >= 0) {
            ++cramped_;
            break;
        }
        const Index chosen = closure_node();
        if (chosen < 0) break;
        low_ = chosen;
        if (random_.below(256) < coin && line_.has_room(chosen)) {
            --front_;
            return Edit{chosen, front_, true};
        }
    }
    return std::nullopt;
}

// The last node before `low_` that the closure's steps read and nobody does after them, so that it may have been gone; -1
// without one.
Index Edits::closure_node() const {
    const Graph& graph = line_.graph();
    Index chosen = -1;
    for (Index slot = front_; slot <= back_; ++slot) {
        for (Index storage : graph.reads[line_.node_at(slot)]) {
            const Index base = graph.storage_node[storage];
            if (base <= chosen || base >= low_ || !graph.recomputable[base] || graph.held[storage]) continue;
            const Index index = line_.before(base, front_);
            const Index high = line_.compute_after(base, index);
            if (line_.last_use(storage, line_.slot_of(base, index), high) <= back_) chosen = base;
        }
    }
    return chosen;
}

// How many more insertions before the step in the slot were asked for in a row.
Index Edits::waiting_for(Index slot) const {
    const auto other = std::find_if(asked_.rbegin(), asked_.rend(), [&](const Edit& edit) {
        return !edit.inserts || edit.slot != slot;
    });
    return static_cast<Index>(other - asked_.rbegin());
}

std::optional<Edits::Edit> Edits::next_asked(Number coin) {
    while (!asked_.empty()) {
        const Edit edit = asked_.back();
        asked_.pop_back();
        if (!edit.inserts) return edit;
        const Index previous = line_.step_before(edit.slot);
        const Index free = edit.slot - previous;
        if (free < 2) {
            ++cramped_;
        } else if (previous >= line_.first_slot(edit.node) && line_.has_room(edit.node)) {
            const Index room = std::max(free / (waiting_for(edit.slot) + 2), 1);
            front_ = coin > 0 ? edit.slot - std::max(free / 4, 1) : previous + room;
            back_ = front_;
            low_ = edit.node;
            return Edit{edit.node, front_, true};
        }
    }
    return std::nullopt;
}

std::optional<Edits::Edit> Edits::next_useless() {
    while (!pending_.empty()) {
        const auto [node, slot] = pending_.back();
        pending_.pop_back();
        const bool there = line_.node_at(slot) == node && slot != line_.first_slot(node);
        if (there && !line_.used(node, slot)) return Edit{node, slot, false};
    }
    return std::nullopt;
}

}  // namespace lowtide
