#include "chain.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <tuple>
#include <utility>

namespace lowtide {
namespace {

constexpr double out_of_reach = static_cast<double>(never);

// Before a block, with what came into it still to be kept or moved.
struct State {
    double kept = 0, leaving = 0, coming = 0, made = 0, time = 0;
    Index first = 0;    // the block from which on `made` was made
    Index parent = -1;  // in the rows
    Index slots = 0;
    bool moved = false;
    Index block = 0;  // before which it stands
};

using States = std::vector<State>;

// The quotient rounded down, exactly.
Number quotient(double bytes, double unit) {
    const double rest = std::fmod(bytes, unit);
    return static_cast<Number>(std::round((bytes - rest) / unit)) - (rest < 0 ? 1 : 0);
}

class Chains {
  public:
    explicit Chains(const ChainCosts& costs)
        : costs_(costs), blocks_(static_cast<Index>(costs.forward_ns.size())), waiting_(2 * (blocks_ + 1)) {}

    Way run() {
        waiting_[0].push_back({});
        for (Index block = 0; block <= blocks_; ++block) {
            for (Index saved = 0; saved < 2; ++saved) {
                const States states = best(std::exchange(waiting_[2 * block + saved], {}));
                if (states.empty()) continue;
                const Index first = static_cast<Index>(rows_.size());
                std::ranges::copy(states, std::back_inserter(rows_));
                for (std::size_t at = first; at < rows_.size(); ++at) rows_[at].block = block;
                end(block, states, first);
                if (block == blocks_) continue;
                save(block, states, first);
                for (Index high = block + 1; high < blocks_; ++high) again(block, high, states, first);
            }
        }
        return ends_.empty() ? Way{} : way();
    }

  private:
    // One state per cell, none that another undercuts.
    States best(States states) const {
        const Index side = costs_.cells + 1;
        const double unit = std::max(costs_.room, 1.0) / costs_.cells;
        const auto cell = [&](double bytes) { return std::min<Number>(static_cast<Number>(bytes / unit), costs_.cells); };
        std::vector<double> grid(static_cast<std::size_t>(side) * side * side, std::numeric_limits<double>::infinity());
        std::vector<std::size_t> places;
        for (const State& one : states) {
            places.push_back((cell(one.kept) * side + cell(one.leaving)) * side + cell(one.coming));
            grid[places.back()] = std::min(grid[places.back()], one.time);
        }
        for (std::size_t stride = 1; stride < grid.size(); stride *= side) {
            for (std::size_t at = 0; at < grid.size(); ++at) {
                if (at / stride % side > 0) grid[at] = std::min(grid[at], grid[at - stride]);
            }
        }
        std::vector<std::size_t> chosen(grid.size(), states.size());
        for (std::size_t at = states.size(); at-- > 0;) {
            if (states[at].time <= grid[places[at]]) chosen[places[at]] = at;
        }
        States found;
        for (std::size_t at : chosen) {
            if (at < states.size()) found.push_back(states[at]);
        }
        return found;
    }

    double free_of(const State& state) const { return costs_.room - state.kept - state.made; }

    void save(Index block, const States& states, Index first) {
        for (Number option = costs_.start[block]; option < costs_.start[block + 1]; ++option) {
            const double forward = static_cast<double>(costs_.option_forward_peak[option]) * costs_.unit_bytes;
            const double backward = static_cast<double>(costs_.option_backward_peak[option]) * costs_.unit_bytes;
            const double backward_ns = costs_.backward_ns[block] + static_cast<double>(costs_.extra_ns[option]);
            States after;
            for (std::size_t at = 0; at < states.size(); ++at) {
                State one = states[at];
                const double free = free_of(one);
                if (free < std::max(forward, backward)) continue;
                const double early = std::max(forward + one.leaving - free, 0.0);
                const double late = std::max(backward + one.coming - free, 0.0);
                one.leaving = std::max(one.leaving - costs_.forward_ns[block] * costs_.leave_rate - early, 0.0);
                one.coming = std::max(one.coming - backward_ns * costs_.come_rate - late, 0.0);
                one.time = one.time + (costs_.forward_ns[block] + backward_ns) + early / costs_.leave_rate +
                           late / costs_.come_rate;
                one.parent = first + static_cast<Index>(at);
                one.slots = static_cast<Index>(costs_.start[block] - option - 1);
                after.push_back(one);
            }
            choose(after, static_cast<double>(costs_.saved[option]) * costs_.unit_bytes, block, waiting_[2 * block + 3]);
        }
    }

    void again(Index low, Index high, const States& states, Index first) {
        double most = 0, drained = -std::numeric_limits<double>::infinity(), elapsed = 0, back_ns = 0;
        for (Index block = low; block < high; ++block) {
            const Number slots = between(costs_.crossing, low, block) + between(costs_.forward_peak, block, block + 1);
            const double peak = static_cast<double>(slots) * costs_.unit_bytes;
            most = block == low ? peak : std::max(most, peak);
            drained = std::max(drained, peak - costs_.leave_rate * elapsed);
            elapsed += costs_.forward_ns[block];
            back_ns += costs_.backward_ns[block];
        }
        for (const bool sets_aside : {true, false}) {
            States after;
            for (std::size_t at = 0; at < states.size(); ++at) {
                State one = states[at];
                const double free = free_of(one), aside = sets_aside ? one.coming : 0.0;
                if (free < most) continue;
                const double early = std::max(drained + one.leaving - free, 0.0);
                const Number slots = quotient(free - aside, costs_.unit_bytes);
                const double taken = rotor(low, high, slots) + back_ns;
                if (taken >= out_of_reach) continue;
                one.time = one.time + elapsed + taken + early / costs_.leave_rate + (one.coming - aside) / costs_.come_rate;
                one.leaving = std::max(one.leaving - (elapsed * costs_.leave_rate + early), 0.0);
                one.coming = std::max(aside - taken * costs_.come_rate, 0.0);
                one.parent = first + static_cast<Index>(at);
                one.slots = static_cast<Index>(slots);
                after.push_back(one);
            }
            const double made = static_cast<double>(between(costs_.crossing, low, high)) * costs_.unit_bytes;
            choose(after, made, low, waiting_[2 * high]);
        }
    }

    // With what was made before them kept, and moved.
    static void choose(const States& after, double made, Index first, States& found) {
        for (State one : after) {
            one.kept += one.made;
            one.made = made;
            one.first = first;
            one.moved = false;
            found.push_back(one);
        }
        for (State one : after) {
            if (one.made <= 0) continue;
            one.leaving += one.made;
            one.coming += one.made;
            one.made = made;
            one.first = first;
            one.moved = true;
            found.push_back(one);
        }
    }

    // The quickest ways to end from these states.
    void end(Index block, const States& states, Index first) {
        double back_ns = 0;
        for (Index rest = block; rest < blocks_; ++rest) back_ns += costs_.backward_ns[rest];
        for (const bool sets_aside : {true, false}) {
            double least = std::numeric_limits<double>::infinity();
            std::tuple<double, Index, Index> found;
            for (std::size_t at = 0; at < states.size(); ++at) {
                const State& one = states[at];
                const double links = one.leaving / costs_.leave_rate + one.coming / costs_.come_rate;
                const double aside = sets_aside ? std::max(one.leaving, one.coming) : 0.0;
                const Number free = quotient(free_of(one) - aside, costs_.unit_bytes);
                const double taken = block < blocks_ ? rotor(block, blocks_, free) + back_ns : free >= 0 ? 0.0 : out_of_reach;
                const double time = one.time + taken + (aside > 0 ? std::max(links - taken, 0.0) : links);
                if (time >= least) continue;
                least = time;
                found = {time, first + static_cast<Index>(at), static_cast<Index>(free)};
            }
            if (least < out_of_reach) ends_.push_back(found);
        }
    }

    Way way() const {
        auto [time, row, slots] = std::ranges::min(ends_);
        std::vector<Segment> found{{rows_[row].block, blocks_, slots, 0, rows_[row].first}};
        while (rows_[row].parent >= 0) {
            const State& state = rows_[row];
            const State& before = rows_[state.parent];
            found.push_back({before.block, state.block, state.slots, state.moved, before.first});
            row = state.parent;
        }
        std::erase_if(found, [](const Segment& one) { return one.low >= one.high; });
        std::ranges::reverse(found);
        return {time, std::move(found)};
    }

    Number between(Numbers table, Index low, Index high) const { return table[low * (blocks_ + 1) + high]; }

    double rotor(Index low, Index high, Number slots) const {
        if (slots < 0) return out_of_reach;
        const std::size_t row = static_cast<std::size_t>(low * (blocks_ + 1) + high) * costs_.slots;
        return static_cast<double>(costs_.best_ns[row + std::min<Number>(slots, costs_.slots - 1)]);
    }

    const ChainCosts& costs_;
    const Index blocks_;
    std::vector<States> waiting_;  // by block, and whether the one before is saved
    States rows_;                  // all that were best somewhere
    std::vector<std::tuple<double, Index, Index>> ends_;  // time, row of the last state, slots of the rest
};

}  // namespace

Way chain_way(const ChainCosts& costs) { return Chains(costs).run(); }

}  // namespace lowtide
