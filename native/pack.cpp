#include "pack.hpp"

#include <algorithm>
#include <chrono>
#include <limits>
#include <numeric>
#include <unordered_set>
#include <utility>

namespace lowtide {
namespace {

using Clock = std::chrono::steady_clock;

constexpr Number unsupported = std::numeric_limits<Number>::max() / 4;
constexpr Index deepest = 3000;            // calls within one another, for the sake of the stack
constexpr std::size_t large = 150;          // buffers
constexpr Index stride = 8;
constexpr std::size_t most_dead = 1 << 21;  // states remembered

// A state of a part, as two independent hashes of what each of its buffers lies on.
struct State {
    std::uint64_t first = 0, second = 0;
    bool operator==(const State&) const = default;
};

struct StateHash {
    std::size_t operator()(const State& state) const { return static_cast<std::size_t>(state.first); }
};

std::uint64_t mixed(std::uint64_t bits) {
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9;
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB;
    return bits ^ (bits >> 31);
}

struct Part {
    std::size_t begin, end;  // in the pool of members
    Index last = 0;          // the section before which it ends
};

class Search {
public:
    Search(const Buffers& buffers, Indices rank, Number capacity, Number most_visits, double most_seconds)
        : buffers_(buffers),
          rank_(rank),
          capacity_(capacity),
          most_visits_(most_visits),
          until_(Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(most_seconds))),
          floor_(buffers.count(), 0),
          refused_(buffers.count(), -1),
          placed_(buffers.count(), 0),
          least_(buffers.count(), 0),
          load_(buffers.sections(), 0),
          blame_(buffers.count(), 0) {
        members_.resize(buffers.count());
        std::iota(members_.begin(), members_.end(), 0);
        std::ranges::stable_sort(members_, {}, [&](Index buffer) { return buffers_.first(buffer); });
    }

    Packing run() {
        const bool found = all_parts({0, members_.size()}, 0);
        const Packed status = found ? Packed::found : gave_up_ ? Packed::unknown : Packed::none;
        return {status, found ? std::move(floor_) : std::vector<Number>(), std::move(blame_), visits_};
    }

private:
    // Whether what is left can be placed. It falls into parts that are never live at the same time, each of which must.
    bool all_parts(Part left, Index depth) {
        std::vector<Part> parts;
        Index end = -1;
        for (std::size_t at = left.begin; at < left.end; ++at) {
            const Index buffer = members_[at];
            if (buffers_.first(buffer) >= end) parts.push_back({at, at});
            end = std::max(end, buffers_.last(buffer));
            parts.back().end = at + 1;
            parts.back().last = end;
        }
        std::ranges::stable_sort(parts, {}, [](const Part& part) { return part.end - part.begin; });
        return std::ranges::all_of(parts, [&](const Part& part) { return one_part(part, depth); });
    }

    // Whether a part can be placed: with its lowest buffer where that could lie, or with that refused, and so on.
    bool one_part(Part part, Index depth) {
        const std::size_t before = changes_.size();
        std::vector<State> states;
        bool found = false;
        while (!give_up(depth) && (states.empty() && unlooked(part, depth) ? find_least(part) : within_bounds(part))) {
            const State state = state_of(part);
            if (dead_.contains(state)) break;
            states.push_back(state);
            const Index lowest = *std::ranges::min_element(queue_, {}, [&](Index buffer) { return std::pair(least_[buffer], rank_[buffer]); });
            found = with_placed(lowest, part, depth);
            if (found || gave_up_ || !has_neighbours(lowest)) break;  // alone it may as well lie as low as it can
            refuse(lowest);
        }
        if (found) return true;
        undo(before);
        if (!gave_up_ && dead_.size() < most_dead) dead_.insert(states.begin(), states.end());
        return false;
    }

    bool with_placed(Index buffer, Part part, Index depth) {
        const std::size_t before = changes_.size(), begin = members_.size();
        const Number top = floor_[buffer] + buffers_.size(buffer);
        if (top > capacity_) return false;
        change(placed_[buffer], 1);
        for (Index other : buffers_.neighbours(buffer)) {
            if (!placed_[other] && floor_[other] < top) change(floor_[other], top);
        }
        for (std::size_t at = part.begin; at < part.end; ++at) {
            const Index member = members_[at];
            if (member != buffer) members_.push_back(member);
        }
        const bool found = all_parts({begin, members_.size()}, depth + 1);
        members_.resize(begin);
        if (!found) undo(before);
        return found;
    }

    // Bounds take time in proportion to a part. On the way down a large one is looked at now and then only; whatever goes wrong
    // in between is found when the search comes back.
    static bool unlooked(Part part, Index depth) { return part.end - part.begin > large && depth % stride != 0; }

    bool give_up(Index depth) {
        gave_up_ = gave_up_ || visits_ >= most_visits_ || depth > deepest || Clock::now() > until_;
        return gave_up_;
    }

    // Finds the least offset that each buffer of the part may still get, and sorts the part by it. False where one ends above
    // the capacity, or where in some section those from an offset on have more bytes than there are above it.
    bool within_bounds(Part part) {
        if (!find_least(part)) return false;
        std::ranges::sort(queue_, [&](Index one, Index other) {
            return std::pair(least_[one], rank_[one]) < std::pair(least_[other], rank_[other]);
        });
        std::fill(load_.begin() + buffers_.first(members_[part.begin]), load_.begin() + part.last, 0);
        for (auto at = queue_.rbegin(); at != queue_.rend(); ++at) {
            const Number size = buffers_.size(*at), room = capacity_ - least_[*at];
            const Index last = buffers_.last(*at);
            visits_ += last - buffers_.first(*at);
            for (Index section = buffers_.first(*at); section < last; ++section) {
                load_[section] += size;
                if (load_[section] <= room) continue;
                blame(queue_.rbegin(), at + 1, section);
                return false;
            }
        }
        return true;
    }

    template <class Position>
    void blame(Position from, Position to, Index section) {
        for (; from != to; ++from) {
            if (buffers_.first(*from) <= section && section < buffers_.last(*from)) ++blame_[*from];
        }
    }

    // A buffer refused where it would lie on what is placed must lie on one that is not placed yet.
    bool find_least(Part part) {
        queue_.assign(members_.begin() + static_cast<std::ptrdiff_t>(part.begin),
                      members_.begin() + static_cast<std::ptrdiff_t>(part.end));
        visits_ += static_cast<Number>(queue_.size());
        waiting_.clear();
        for (Index buffer : queue_) {
            const bool waits = refused_[buffer] == floor_[buffer];
            least_[buffer] = waits ? unsupported : floor_[buffer];
            if (waits) waiting_.push_back(buffer);
        }
        bool changed = !waiting_.empty();
        while (changed) {
            changed = false;
            for (Index buffer : waiting_) {
                Number least = least_[buffer];
                for (Index other : buffers_.neighbours(buffer)) {
                    if (!placed_[other]) least = std::min(least, least_[other] + buffers_.size(other));
                }
                changed = changed || least < least_[buffer];
                least_[buffer] = least;
            }
        }
        return std::ranges::all_of(waiting_, [&](Index buffer) { return least_[buffer] + buffers_.size(buffer) <= capacity_; });
    }

    State state_of(Part part) const {
        State state;
        for (std::size_t at = part.begin; at < part.end; ++at) {
            const Index buffer = members_[at];
            const auto name = static_cast<std::uint64_t>(buffer) * 2 + (refused_[buffer] == floor_[buffer] ? 1 : 0);
            const std::uint64_t one = mixed(mixed(name + 0x9E3779B97F4A7C15) + static_cast<std::uint64_t>(floor_[buffer]));
            state.first += one;
            state.second += mixed(one ^ 0xD1B54A32D192ED03);
        }
        return state;
    }

    bool has_neighbours(Index buffer) const {
        return std::ranges::any_of(buffers_.neighbours(buffer), [&](Index other) { return !placed_[other]; });
    }

    // Not where it would lie now; nor one that could change places with it.
    void refuse(Index buffer) {
        change(refused_[buffer], floor_[buffer]);
        for (Index other : buffers_.neighbours(buffer)) {
            if (!placed_[other] && buffers_.alike(buffer, other)) change(refused_[other], floor_[other]);
        }
    }

    void change(Number& number, Number to) {
        changes_.emplace_back(&number, number);
        number = to;
    }

    void undo(std::size_t until) {
        for (; changes_.size() > until; changes_.pop_back()) *changes_.back().first = changes_.back().second;
    }

    const Buffers& buffers_;
    Indices rank_;
    Number capacity_;
    Number most_visits_;
    Clock::time_point until_;
    std::vector<Number> floor_;    // the top of what is placed below a buffer; of a placed one its offset
    std::vector<Number> refused_;  // the floor on which it must not lie
    std::vector<Number> placed_;
    std::vector<std::pair<Number*, Number>> changes_;  // of the three above, with what was there before
    std::vector<Index> members_;                       // of the parts that are open, each by first section
    std::unordered_set<State, StateHash> dead_;
    Number visits_ = 0;
    bool gave_up_ = false;

    std::vector<Number> least_, load_;  // of the part that is looked at
    std::vector<Number> blame_;
    std::vector<Index> queue_, waiting_;
};

}  // namespace

Packing pack(const Buffers& buffers, Indices rank, Number capacity, Number most_visits, double most_seconds) {
    return Search(buffers, rank, capacity, most_visits, most_seconds).run();
}

}  // namespace lowtide
