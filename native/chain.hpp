// The dynamic program over a chain of blocks that are saved, run again or moved, see `lowtide.solve.moving.chain_table`, where
// the recurrence and its letters are explained.
#pragma once

#include <vector>

#include "table.hpp"

namespace lowtide {

struct ChainCosts {
    Index slots;               // of the table, all that it has
    double room;               // bytes, what is always there apart
    double unit_bytes;         // of a slot
    double leave_rate;         // bytes per ns
    double come_rate;
    Index cells;
    Numbers best_ns;           // block, block, slot
    Numbers crossing;          // block, block: slots, as what follows
    Numbers forward_peak;      // block, block
    Numbers start;             // block: its first option
    Numbers saved;             // option
    Numbers option_forward_peak;
    Numbers option_backward_peak;
    Numbers extra_ns;          // option
    std::span<const double> forward_ns;  // block
    std::span<const double> backward_ns;
};

// Blocks `low .. high - 1`, run again in so many slots of the table, or one that is saved by its option `~slots`.
struct Segment {
    Index low;
    Index high;
    Index slots;
    Index moved;  // whether what came into it moves
    Index first;  // the block from which on that was made
};

struct Way {
    double time_ns = 0;
    std::vector<Segment> segments;  // in order
};

// The quickest way; without segments where there is none.
Way chain_way(const ChainCosts& costs);

}  // namespace lowtide
