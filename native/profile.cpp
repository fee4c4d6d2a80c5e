#include "profile.hpp"

#include <algorithm>

namespace lowtide {

void Profile::add(Index first, Index last, Number amount) {
    if (first > last || amount == 0) return;
    const Index left = first / block_slots;
    const Index right = last / block_slots;
    if (left == right) {
        add_inside(first, last + 1, amount);
        return;
    }
    add_inside(first, (left + 1) * block_slots, amount);
    for (Index block = left + 1; block < right; ++block) {
        added_[block] += amount;
        top_[block] += amount;
    }
    add_inside(right * block_slots, last + 1, amount);
}

// The slots from `first` to before `end`, all of one block.
void Profile::add_inside(Index first, Index end, Number amount) {
    for (Index slot = first; slot < end; ++slot) inner_[slot] += amount;
    refresh(first / block_slots);
}

void Profile::refresh(Index block) {
    const std::span inside(inner_.begin() + block * block_slots, block_slots);
    Number top = inside[0];
    for (Number value : inside) top = std::max(top, value);
    top_[block] = top + added_[block];
}

void Profile::assign(Numbers values) {
    std::ranges::copy(values, inner_.begin());
    std::ranges::fill(added_, 0);
    for (Index block = 0; block < blocks(); ++block) refresh(block);
}

Number Profile::peak() const {
    Number peak = 0;
    for (Number top : top_) peak = std::max(peak, top);
    return peak;
}

Index Profile::peak_slot() const {
    const Index first = static_cast<Index>(std::ranges::max_element(top_) - top_.begin()) * block_slots;
    const std::span inside(inner_.begin() + first, block_slots);
    return first + static_cast<Index>(std::ranges::max_element(inside) - inside.begin());
}

Excess Profile::excess(Number budget) const {
    Excess excess{0, 0};
    for (Number top : top_) {
        const Number over = std::max<Number>(top - budget, 0);
        excess.total += over;
        excess.largest = std::max(excess.largest, over);
    }
    return excess;
}

std::vector<Number> Profile::values() const {
    std::vector<Number> values = inner_;
    for (std::size_t slot = 0; slot < values.size(); ++slot) values[slot] += added_[slot / block_slots];
    return values;
}

}  // namespace lowtide
