// Placing buffers one after the other, see `lowtide.place.orders`.
#pragma once

#include "buffers.hpp"

namespace lowtide {

enum class Rule {
    first,   // in the order given, each in the lowest gap that holds it
    best,    // in the order given, each in the smallest gap that holds it
    lowest,  // always the one that would come to lie lowest on top of what is placed, the earlier in the order among equals
};

// Offsets by buffer. `order`: every buffer once.
std::vector<Number> fit(const Buffers& buffers, Indices order, Rule rule);

}  // namespace lowtide
