// Earlier places for what runs beside computing: transfers back, and collectives.
//
// One pass over the schedule, in the order in which things are asked for. Each moves to the first place at which
//
// - there is room for what it makes, from there to its old place;
// - all that it needs is there, and what it makes was freed;
// - what was before it on its lane is before it still, so that the order of collectives stays;
// - its lane is about to become free; where it is to come just in time, is about to be used where all that follow are to end when
//   they are needed: what comes no earlier than that leaves its room to others.
//
// A collective moves within its pass: one that needs nothing of the program up to the last effect before it, others only where
// they run again.
#pragma once

#include <vector>

#include "clock.hpp"

namespace lowtide {

// The step at `position` runs on `lane` for so long, makes so many bytes, and can come before any step from `low` on, as far as
// what it needs is concerned.
struct Item {
    Index position;
    Lane lane;
    Number time_ns;
    Number bytes;
    Index low;
};

// What runs beside computing and can come earlier, and the collectives that cannot, which others stay behind.
std::vector<Item> movable(const Program& program, const Steps& steps);

// The schedule with transfers back, and collectives that run beside computing, as early as fits.
Steps with_early(const Program& program, const Steps& steps, Number budget_bytes, bool just_in_time);

}  // namespace lowtide
