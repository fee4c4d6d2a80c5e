// The dynamic program over a chain of blocks with a menu of options each, see `lowtide.solve.blocks.table`; and the one
// over nested segments, see `lowtide.solve.search.segments`.
#pragma once

#include <vector>

#include "graph.hpp"

namespace lowtide {

// What the recurrence reads; bytes in slots. Options of block i are start[i] to start[i + 1] - 1.
struct TableCosts {
    Numbers forward_ns;           // block
    Numbers crossing;             // block, block
    Numbers forward_peak;         // block, block
    Numbers gradients;            // block
    Numbers start;
    Numbers saved;                // option, as what follows
    Numbers option_forward_peak;
    Numbers option_backward_peak;
    Numbers rerun_ns;
    Numbers extra_ns;
};

inline constexpr Number never = Number{1} << 61;

// By first block, last block (excluded) and free slots: the least time, and the cut j or the option k (as ~k) behind it.
struct Table {
    std::vector<Number> best_ns;
    std::vector<Index> choice;
};

Table fill_table(const TableCosts& costs, Index size);

// The minimising cut of E(l, h, s) for all l, h, s.
std::vector<Index> best_splits(Numbers times, Index slots);

}  // namespace lowtide
