// One reverse sweep over a sequence of computes: its peak and time, unused recomputes dropped.
#pragma once

#include <vector>

#include "graph.hpp"

namespace lowtide {

struct Candidate {
    std::vector<Index> codes;
    Number recompute_ns = 0;
    Number peak_bytes = 0;  // without what is always there
};

Candidate sweep(const Graph& graph, Indices source);

}  // namespace lowtide
