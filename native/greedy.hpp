// Greedy eviction over a compact model, see `lowtide.solve.greedy`.
#pragma once

#include <vector>

#include "graph.hpp"

namespace lowtide {

// An encoded sequence that evicts whenever the next compute would exceed the budget; it may still exceed it. Empty where
// more than `most_steps` steps would be needed.
std::vector<Index> greedy_sequence(const Graph& graph, Number budget, Number most_steps);

}  // namespace lowtide
