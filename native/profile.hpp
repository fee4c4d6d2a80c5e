// Bytes over time under range additions, with the largest value and the excess over a budget at hand.
#pragma once

#include <vector>

#include "graph.hpp"

namespace lowtide {

struct Excess {
    Number largest;
    Number total;  // over the blocks, of the largest in each
};

// Square-root decomposition: slots in blocks of 64, each with its own addition and maximum. An addition costs two partial
// blocks and one pass over the blocks between.
class Profile {
public:
    static constexpr Index block_slots = 64;

    // All zero; `slots` is a multiple of `block_slots`.
    explicit Profile(Index slots)
        : inner_(slots), added_(slots / block_slots), top_(slots / block_slots) {}

    // Adds to the slots from `first` to `last`, both included; nothing where `first` > `last`.
    void add(Index first, Index last, Number amount);

    // Replaces every value.
    void assign(Numbers values);

    Number peak() const;
    Index peak_slot() const;
    Excess excess(Number budget) const;
    std::vector<Number> values() const;
    Index blocks() const { return static_cast<Index>(top_.size()); }

private:
    void add_inside(Index first, Index end, Number amount);
    void refresh(Index block);

    std::vector<Number> inner_;  // the value at slot i is inner_[i] + added_[i / 64]
    std::vector<Number> added_;
    std::vector<Number> top_;    // the maximum of each block
};

}  // namespace lowtide
