#include "table.hpp"

#include <algorithm>

namespace lowtide {
namespace {

// Time of everything before each block.
std::vector<Number> elapsed(Numbers times) {
    std::vector<Number> until{0};
    for (Number time : times) until.push_back(until.back() + time);
    return until;
}

class Filling {
public:
    Filling(const TableCosts& costs, Index size)
        : costs_(costs),
          blocks_(static_cast<Index>(costs.forward_ns.size())),
          size_(size),
          until_(elapsed(costs.forward_ns)) {
        const std::size_t entries = static_cast<std::size_t>(blocks_ + 1) * (blocks_ + 1) * size;
        table_.best_ns.assign(entries, never);
        table_.choice.assign(entries, 0);
    }

    Table run() {
        for (Index length = 1; length <= blocks_; ++length) {
            for (Index low = 0; low + length <= blocks_; ++low) fill(low, low + length);
        }
        return std::move(table_);
    }

private:
    std::size_t row(Index low, Index high) const {
        return (static_cast<std::size_t>(low) * (blocks_ + 1) + high) * size_;
    }
    std::span<Number> times(Index low, Index high) { return std::span(table_.best_ns).subspan(row(low, high), size_); }
    Number between(Numbers square, Index low, Index high) const { return square[low * (blocks_ + 1) + high]; }

    void fill(Index low, Index high) {
        for (Number option = costs_.start[low]; option < costs_.start[low + 1]; ++option) save(low, high, option);
        for (Index middle = low + 1; middle < high; ++middle) cut(low, high, middle);
    }

    // The first block by one of its options, the others after it.
    void save(Index low, Index high, Number option) {
        const bool alone = high - low == 1;
        const Number forward = alone && high < blocks_ ? costs_.rerun_ns[option] : costs_.forward_ns[low];
        const Number time = costs_.extra_ns[option] + forward;
        const Number forward_peak = costs_.option_forward_peak[option] + costs_.gradients[high];
        Number least = std::max(forward_peak, costs_.option_backward_peak[option]);
        const Number taken = alone ? 0 : costs_.saved[option];
        least = std::max(least, taken);
        const Index how = ~static_cast<Index>(option - costs_.start[low]);
        if (alone) {
            for (Number free = least; free < size_; ++free) take(row(low, high) + free, time, how);
        } else {
            const std::size_t after = row(low + 1, high);
            for (Number free = least; free < size_; ++free) {
                take(row(low, high) + free, time + table_.best_ns[after + free - taken], how);
            }
        }
    }

    // The blocks up to `middle` run forward only, then what is behind them, then they themselves.
    void cut(Index low, Index high, Index middle) {
        const Number time = until_[middle] - until_[low];
        const Number taken = between(costs_.crossing, low, middle);
        const Number peak = between(costs_.forward_peak, low, middle) + costs_.gradients[high];
        const std::size_t inside = row(middle, high), after = row(low, middle);
        for (Number free = std::max(peak, taken); free < size_; ++free) {
            const Number total = time + table_.best_ns[inside + free - taken] + table_.best_ns[after + free];
            take(row(low, high) + free, total, middle);
        }
    }

    void take(std::size_t entry, Number total, Index how) {
        if (total >= table_.best_ns[entry]) return;
        table_.best_ns[entry] = total;
        table_.choice[entry] = how;
    }

    const TableCosts& costs_;
    Index blocks_;
    Index size_;
    std::vector<Number> until_;
    Table table_;
};

}  // namespace

Table fill_table(const TableCosts& costs, Index size) {
    return Filling(costs, size).run();
}

std::vector<Index> best_splits(Numbers times, Index slots) {
    const Index blocks = static_cast<Index>(times.size());
    const std::vector<Number> until = elapsed(times);
    const auto place = [&](Index low, Index high, Index left) { return (low * (blocks + 1) + high) * (slots + 1) + left; };
    std::vector<Number> extra((blocks + 1) * (blocks + 1) * (slots + 1));
    std::vector<Index> split(extra.size());
    for (Index length = 2; length <= blocks; ++length) {
        for (Index low = 0; low + length <= blocks; ++low) {
            const Index high = low + length;
            for (Index block = low; block < high - 1; ++block) extra[place(low, high, 0)] += until[block + 1] - until[low];
            for (Index left = 1; left <= slots; ++left) {
                Number best = never;
                for (Index middle = low + 1; middle < high; ++middle) {
                    const Number again = extra[place(middle, high, left - 1)] + extra[place(low, middle, left)];
                    const Number cost = again + until[middle] - until[low];
                    if (cost >= best) continue;
                    best = cost;
                    split[place(low, high, left)] = middle;
                }
                extra[place(low, high, left)] = best;
            }
        }
    }
    return split;
}

}  // namespace lowtide
