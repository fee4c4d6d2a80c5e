#include "fit.hpp"

#include <algorithm>
#include <functional>
#include <limits>
#include <queue>
#include <utility>

namespace lowtide {
namespace {

using Stretch = std::pair<Number, Number>;  // from, to

// The lowest or the smallest gap of at least `size` between taken stretches, which lie in the order of their beginnings.
Number gap_between(const std::vector<Stretch>& taken, Number size, bool smallest) {
    Number free = 0, found = -1, least = std::numeric_limits<Number>::max();
    for (const auto& [from, to] : taken) {
        const Number room = from - free;
        if (room >= size && room < least) {
            found = free;
            least = room;
            if (!smallest) break;
        }
        free = std::max(free, to);
    }
    return found < 0 ? free : found;
}

std::vector<Number> into_gaps(const Buffers& buffers, Indices order, bool smallest) {
    std::vector<Number> offsets(buffers.count(), -1);
    std::vector<Stretch> taken;
    for (Index buffer : order) {
        taken.clear();
        for (Index other : buffers.neighbours(buffer)) {
            if (offsets[other] >= 0) taken.emplace_back(offsets[other], offsets[other] + buffers.size(other));
        }
        std::ranges::sort(taken);
        offsets[buffer] = gap_between(taken, buffers.size(buffer), smallest);
    }
    return offsets;
}

std::vector<Number> onto_lowest(const Buffers& buffers, Indices order) {
    using Entry = std::pair<Number, Index>;  // height, position in the order; outdated where the height has grown
    std::vector<Entry> entries;
    for (Index position = 0; position < buffers.count(); ++position) entries.emplace_back(0, position);
    std::priority_queue<Entry, std::vector<Entry>, std::greater<>> queue(std::greater<>(), std::move(entries));
    std::vector<Number> height(buffers.count());
    std::vector<char> placed(buffers.count());
    while (!queue.empty()) {
        const auto [below, position] = queue.top();
        const Index buffer = order[position];
        queue.pop();
        if (placed[buffer]) continue;
        if (height[buffer] > below) {
            queue.emplace(height[buffer], position);
            continue;
        }
        placed[buffer] = 1;
        const Number top = below + buffers.size(buffer);
        for (Index other : buffers.neighbours(buffer)) {
            if (!placed[other]) height[other] = std::max(height[other], top);
        }
    }
    return height;
}

}  // namespace

std::vector<Number> fit(const Buffers& buffers, Indices order, Rule rule) {
    return rule == Rule::lowest ? onto_lowest(buffers, order) : into_gaps(buffers, order, rule == Rule::best);
}

}  // namespace lowtide
