// A sequence of computes under edits, with its bytes over time and its recompute time kept up to date.
//
// Steps stand in slots, with free slots between them for insertions. A storage lives from each compute of its base to the
// last use before the next one; the profile holds, per slot, the bytes of the lives that cover it and the workspace of the
// step there. Inserting or removing one recompute touches the lives of what it reads and of what it allocates, so an edit
// costs time in proportion to the operator's neighbours and the square root of the length, not to the length:
//
// - what it reads lives on to the new step, where its life ended before;
// - what it allocates is renewed: the life that covers the step is cut at the last use before it;
// - what ends elsewhere now, or not any more, is written over there, or not any more.
//
// The same semantics as `sweep`, which checks it in the tests.
#pragma once

#include <vector>

#include "graph.hpp"
#include "profile.hpp"

namespace lowtide {

class Timeline {
public:
    // Empty, for sequences of about `length` steps in which no node is computed more than `repeats` times.
    Timeline(const Graph& graph, Index length, Index repeats);

    // Spreads an encoded sequence evenly over the slots and measures it from scratch.
    void load(Indices codes);
    std::vector<Index> codes() const;

    // Add a recompute at a free slot, or remove one; each undoes exactly what the other did.
    void insert(Index node, Index slot);
    void remove(Index node, Index slot);

    const Graph& graph() const { return graph_; }
    const Profile& profile() const { return profile_; }
    Number recompute_ns() const { return recompute_ns_; }
    Index size() const { return static_cast<Index>(node_at_.size()); }
    Indices recomputes() const { return recomputes_; }

    Index node_at(Index slot) const { return node_at_[slot]; }  // -1 where it is free
    Index computes(Index node) const { return computes_[node]; }
    Index slot_of(Index node, Index index) const { return slots_[node * repeats_ + index]; }
    Index first_slot(Index node) const { return slot_of(node, 0); }
    bool is_recompute(Index slot) const { return first_slot(node_at_[slot]) != slot; }
    bool has_room(Index node) const;

    // The index of the node's last compute before the slot, -1 without one.
    Index before(Index node, Index slot) const;
    // The slot of the node's compute after the one with this index; the number of slots without one.
    Index compute_after(Index node, Index index) const;
    // The last slot strictly between that reads the storage, `low` without one.
    Index last_use(Index storage, Index low, Index high) const;
    // The first slot after `low` that reads something the node allocates; the number of slots without one.
    Index next_use(Index node, Index low) const;
    // Whether something reads what the compute in the slot allocates, before the node's next compute.
    bool used(Index node, Index slot) const;
    // The slot of the step before, -1 without one.
    Index step_before(Index slot) const;
    // The first slot from this one on in which a step stands; the end of the program stands in the last.
    Index step_from(Index slot) const;

private:
    // A compute that is added or taken away while it does not stand in its slot.
    struct Change {
        Index node;
        Index slot;
        Number sign;
    };
    static constexpr Change none{-1, -1, 0};

    Index& slot_entry(Index node, Index index) { return slots_[node * repeats_ + index]; }
    Index last_before(Index reader, Index high) const;
    bool view_needed(Index view, Index low, Index high) const;
    bool reads(Index node, Index storage) const;
    Index life_end(Index storage, Index slot, const Change& change) const;
    bool overwrites(Index reader, Index slot, const Change& change) const;
    void move_overwrite(Index storage, Index end, const Change& change);
    void apply(const Change& change);
    Number extend_reads(const Change& change);
    Number renew_owns(const Change& change, Number& here);
    void put(Index node, Index slot);
    void take(Index node, Index slot);
    Number lives_with(Index view) const;
    void measure();
    void measure_storage(Index storage, std::vector<Number>& at, std::vector<Number>& rises) const;
    void measure_node(Index node, std::vector<Number>& at, std::vector<Number>& rises) const;

    Graph graph_;
    Index repeats_;
    std::vector<Index> node_at_;     // by slot
    std::vector<Index> slots_;       // by node: the slots of its computes, ascending
    std::vector<Index> computes_;    // by node: how many of these there are
    std::vector<Index> recomputes_;  // slots of all recomputes, in no order
    std::vector<Index> place_;       // slot -> its index in recomputes_
    Profile profile_;
    Number recompute_ns_ = 0;
};

}  // namespace lowtide
