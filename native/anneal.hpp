// Simulated annealing over compute sequences: the engine of `auto` and of `minimum_peak`. What it minimises is described in
// `lowtide.solve.search.anneal`.
#pragma once

#include "moves.hpp"
#include "sweep.hpp"

namespace lowtide {

struct AnnealSettings {
    Number budget_bytes;
    Number iterations;
    double hot;
    double cold;
    double pressure;
    double time_weight;
    double lower;
    Number target_bytes;
    Number target_ns;
    double rate;
};

// The quickest sequence within the budget that was met (the lowest, with `lower`), from `first` on; no codes where no
// sequence within the (last) budget was met.
Candidate anneal(const Graph& graph, const Classes& classes, Indices first, const AnnealSettings& settings, Random random);

}  // namespace lowtide
