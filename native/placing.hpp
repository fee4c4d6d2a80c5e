// When transfers run, and collectives beside computing: a schedule that frees what they need as soon as it can, and begins them
// as late as it can, is given the room that a budget leaves.
//
// 1. What fits anyway is not moved: where a storage could stay until it is read again, it does.
// 2. What was offloaded stays until its copy is complete, and what a collective reads until that has ended, instead of being
//    waited for, while there is room for it; what was to be written over it has memory of its own.
// 3. What is fetched or gathered begins to come as early as there is room for it, or just in time, in the order in which it is
//    read, but no earlier than what is before it on its lane lets it (`early.hpp`).
//
// Bytes only move into room that the schedule leaves: a peak within the budget stays there.
#pragma once

#include "clock.hpp"

namespace lowtide {

struct Placed {
    Steps steps;
    Run run;
};

// The schedule with its transfers and collectives where they are waited for least, and without transfers that are needless. Room
// that storages stay in is none that transfers could hide in: several divisions of it are tried.
Placed place(const Program& program, const Steps& steps, Number budget_bytes);

}  // namespace lowtide
