// Schedules and the programs that they run, as the kernels see them: the columns of `lowtide.solve.moving.steps.Program`, and
// the steps of `lowtide.ir.schedule` as rows of three numbers. What a step means is said in `lowtide.ir`; the clock and the bytes
// of these kernels are those of `lowtide.ir.transfers` and `lowtide.ir.simulator`, which tests compare them with.
#pragma once

#include <span>
#include <vector>

#include "graph.hpp"

namespace lowtide {

enum class Kind : Index { compute, release, save_state, restore_state, offload, fetch };

// `of` is an operator or a storage; `into` the storage that a compute writes over, or -1.
struct Step {
    Kind kind;
    Index of;
    Index into;

    bool is(Kind other) const { return kind == other; }
    bool of_state() const { return kind == Kind::save_state || kind == Kind::restore_state; }
};

struct Program {
    Number fixed_bytes;
    Number rng_state_bytes;
    bool shared;  // both directions of the link are one lane
    Numbers time_ns;          // operator
    Numbers workspace_bytes;
    Numbers storage_bytes;    // storage
    Numbers offload_ns;
    Numbers fetch_ns;
    Flags beside;   // operator: it is a collective that runs beside computing
    Flags changes;  // it may change all that it reads
    Flags holds;    // collectives that run first stay behind it
    Flags early;    // it needs nothing of the program
    Flags again;    // it may run again anywhere
    Indices handed;  // storages that the caller is handed
    Ragged owned;    // operator -> storages, as what follows
    Ragged read;
    Ragged changed;
    Ragged touched;
    Ragged written;
    Ragged inputs;   // operator -> values
    Ragged outputs;
    Ragged values;   // storage -> values

    Index storages() const { return static_cast<Index>(storage_bytes.size()); }
    Index operators() const { return static_cast<Index>(time_ns.size()); }
};

struct Steps {
    std::vector<Step> steps;
    Index boundary = 0;

    Index size() const { return static_cast<Index>(steps.size()); }

    // Whether the step must follow the one before, which is of its generator state.
    bool is_due(Index index) const { return index > 0 && steps[index - 1].of_state(); }

    // Whether a step may be put before this one: not between a generator state and its compute, nor before a free.
    bool may_precede(Index index) const { return !is_due(index) && !steps[index].is(Kind::release); }
};

}  // namespace lowtide
