// Branch and bound for a placement within a capacity, see `lowtide.place.search`.
#pragma once

#include "buffers.hpp"

namespace lowtide {

enum class Packed { found, none, unknown };  // none: proven that there is no placement; unknown: given up

struct Packing {
    Packed status;
    std::vector<Number> offsets;  // by buffer, where found
    std::vector<Number> blame;    // by buffer, how often it was one of those that had too many bytes
    Number visits;
};

// `rank`: by buffer, who comes first among those that lie equally low. Gives up after so many visits (of a buffer in a
// section) or seconds.
Packing pack(const Buffers& buffers, Indices rank, Number capacity, Number most_visits, double most_seconds);

}  // namespace lowtide
