// What is resident for certain within a budget, see `lowtide.solve.bounds.liveness`.
#pragma once

#include <vector>

#include "graph.hpp"

namespace lowtide {

// Rows of nodes + 2 slots each.
struct Liveness {
    std::vector<std::uint8_t> open;     // node, slot: the node may be recomputed there
    std::vector<std::uint8_t> certain;  // storage, slot: live throughout the slot
    std::vector<Number> instant_bytes;  // certainly resident while a node is first computed
};

// `until` by node: the last slot in which recomputing it can matter. At most `rounds` rounds.
Liveness close_slots(const Graph& graph, Number room, Numbers until, int rounds);

}  // namespace lowtide
