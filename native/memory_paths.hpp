// The shortest path over memory states that are full, see `lowtide.solve.search.memory_paths`, which says what a state is.
#pragma once

#include <optional>
#include <vector>

#include "graph.hpp"

namespace lowtide {

struct PathQuestion {
    Number room;              // bytes, what is always there apart
    Number below_ns;          // of recomputes: only paths that take less
    bool any_path;            // some path, looked for depth first
    Number states;            // the most that are settled,
    Number edges;             // looked along,
    Number comparisons;       // and made between states
    Indices node_until;       // node -> the last stage in which computing it again can matter
    Indices storage_until;    // storage -> the last in which having it can
};

struct MemoryPath {
    bool found = false;
    std::vector<Index> nodes;  // in the order in which they are computed
    Number recompute_ns = 0;
};

// Nothing where one of the limits is met, or the graph has more than some 2,000 nodes, storages or views.
std::optional<MemoryPath> memory_path(const Graph& graph, const PathQuestion& question);

}  // namespace lowtide
