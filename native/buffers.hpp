// Buffers to be placed, see `lowtide.place`: bytes that are live from section `first` to before section `last`. A section is a
// stretch of time in which no buffer comes or goes.
#pragma once

#include <vector>

#include "graph.hpp"

namespace lowtide {

class Buffers {
public:
    Buffers(Indices first, Indices last, Numbers size);

    Index count() const { return static_cast<Index>(size_.size()); }
    Index sections() const { return sections_; }
    Index first(Index buffer) const { return first_[buffer]; }
    Index last(Index buffer) const { return last_[buffer]; }
    Number size(Index buffer) const { return size_[buffer]; }

    // The buffers that are live at some time at which this one is.
    Indices neighbours(Index buffer) const { return Ragged{start_, entries_}[buffer]; }

    // Whether the two differ in nothing but their number.
    bool alike(Index one, Index other) const {
        return first_[one] == first_[other] && last_[one] == last_[other] && size_[one] == size_[other];
    }

private:
    std::vector<Index> first_, last_;
    std::vector<Number> size_;
    Index sections_ = 0;
    std::vector<Index> start_, entries_;
};

}  // namespace lowtide
