#include "buffers.hpp"

#include <algorithm>
#include <numeric>

namespace lowtide {

Buffers::Buffers(Indices first, Indices last, Numbers size)
    : first_(first.begin(), first.end()), last_(last.begin(), last.end()), size_(size.begin(), size.end()) {
    for (Index end : last_) sections_ = std::max(sections_, end);
    std::vector<Index> by_first(count());
    std::iota(by_first.begin(), by_first.end(), 0);
    std::ranges::stable_sort(by_first, {}, [&](Index buffer) { return first_[buffer]; });

    const auto each_pair = [&](auto visit) {
        for (auto one = by_first.begin(); one != by_first.end(); ++one) {
            for (auto other = one + 1; other != by_first.end() && first_[*other] < last_[*one]; ++other) visit(*one, *other);
        }
    };
    start_.resize(count() + 1);
    each_pair([&](Index one, Index other) { ++start_[one + 1], ++start_[other + 1]; });
    std::partial_sum(start_.begin(), start_.end(), start_.begin());
    entries_.resize(start_.back());
    std::vector<Index> next(start_.begin(), start_.end() - 1);
    each_pair([&](Index one, Index other) { entries_[next[one]++] = other, entries_[next[other]++] = one; });
}

}  // namespace lowtide
