#include "placing.hpp"

#include <algorithm>
#include <set>
#include <tuple>
#include <utility>

#include "early.hpp"
#include "resident.hpp"

namespace lowtide {
namespace {

constexpr Number buffers_tried[] = {0, 1, 2, 4};  // times the largest storage that moves: room that is left to transfers

Steps without(const Steps& source, const std::vector<bool>& dropped) {
    Steps found;
    found.steps.reserve(source.steps.size());
    found.boundary = source.boundary;
    for (Index index = 0; index < source.size(); ++index) {
        if (!dropped[index]) found.steps.push_back(source.steps[index]);
        if (dropped[index] && index < source.boundary) --found.boundary;
    }
    return found;
}

// Without copies that nobody fetches.
Steps used(const Program& program, const Steps& source) {
    std::vector<bool> fetched(program.storages(), false), dropped(source.steps.size(), false);
    for (const Step& step : source.steps) {
        if (step.is(Kind::fetch)) fetched[step.of] = true;
    }
    for (Index index = 0; index < source.size(); ++index) {
        dropped[index] = source.steps[index].is(Kind::offload) && !fetched[source.steps[index].of];
    }
    return without(source, dropped);
}

// Storages stay that there is room for until they are read again, the largest first; not those that are written over. To
// `levels`, bytes by step, those of what stays are added.
Steps without_needless(const Program& program, const Steps& source, std::vector<Number> levels, Number budget) {
    std::vector<Index> freed(program.storages(), 0);
    std::vector<bool> over(program.storages(), false);  // storages that were written over where they were freed last
    std::vector<std::tuple<Number, Index, Index>> gaps;
    for (Index index = 0; index < source.size(); ++index) {
        const Step& step = source.steps[index];
        if (step.is(Kind::compute)) {
            for (Index storage : program.owned[step.of]) over[storage] = false;
            if (step.into >= 0) over[step.into] = true;
        } else if (step.is(Kind::release)) {
            freed[step.of] = index;
        } else if (step.is(Kind::fetch)) {
            if (!over[step.of]) gaps.emplace_back(-program.storage_bytes[step.of], freed[step.of], index);
            over[step.of] = false;
        }
    }
    std::ranges::sort(gaps);
    std::vector<bool> dropped(source.steps.size(), false);
    for (const auto& [less, first, last] : gaps) {
        const std::span between(levels.begin() + first + 1, levels.begin() + last);
        const Number most = between.empty() ? 0 : std::max<Number>(*std::ranges::max_element(between), 0);
        if (most - less > budget) continue;
        for (Number& level : between) level -= less;
        dropped[first] = dropped[last] = true;
    }
    return used(program, without(source, dropped));
}

// Runs a schedule on the clock; what is freed while it is read beside computing waits for room to become scarce.
class LateFrees {
  public:
    LateFrees(const Program& program, const Steps& source, Number budget)
        : program_(program), source_(source), budget_(budget), levels_(resident_bytes(program, source)), clock_(program),
          written_(program.storages(), false) {}

    Steps run() {
        Index boundary = 0;
        for (Index index = 0; index < source_.size(); ++index) {
            const Step& step = source_.steps[index];
            if (!source_.is_due(index)) release(level(index), made_by(index));
            if (index == source_.boundary) {
                boundary = found_.size();
                clock_.hand_over();
            }
            if (step.is(Kind::release) && !written_[step.of] && clock_.releasable(step.of) > clock_.now()) {
                waiting_.emplace(clock_.releasable(step.of), step.of);
                there_ += program_.storage_bytes[step.of];
            } else if (step.is(Kind::fetch) && waiting_.erase({clock_.releasable(step.of), step.of}) > 0) {
                there_ -= program_.storage_bytes[step.of];  // it never left
            } else {
                take(apart(step, index));
            }
        }
        while (!waiting_.empty()) free_first();
        found_.boundary = source_.boundary < source_.size() ? boundary : found_.size();
        return std::move(found_);
    }

  private:
    // A compute that is to write over what is being copied has memory of its own, if there is room.
    Step apart(const Step& step, Index index) const {
        if (!step.is(Kind::compute) || step.into < 0 || clock_.releasable(step.into) <= clock_.now()) return step;
        const bool fits = levels_[index] + there_ + program_.storage_bytes[step.into] <= budget_;
        return fits ? Step{Kind::compute, step.of, -1} : step;
    }

    // The bytes that are there before a place comes at which something can be freed again.
    Number level(Index index) const {
        Number level = levels_[index];
        while (index + 1 < source_.size() && source_.is_due(index + 1)) level = std::max(level, levels_[++index]);
        return level;
    }

    // The storages that are computed before such a place comes.
    Indices made_by(Index index) const {
        while (index + 1 < source_.size() && source_.steps[index].of_state()) ++index;
        const Step& step = source_.steps[index];
        return step.is(Kind::compute) ? program_.owned[step.of] : Indices{};
    }

    // Free what has been copied, what there is no room for beside `level` bytes, and what is made anew.
    void release(Number level, Indices made) {
        const auto again = [&](const auto& entry) { return std::ranges::find(made, entry.second) != made.end(); };
        while (!waiting_.empty()) {
            const bool ended = waiting_.begin()->first <= clock_.now();
            if (!ended && level + there_ <= budget_ && std::ranges::none_of(waiting_, again)) return;
            free_first();
        }
    }

    void free_first() {
        const Index storage = waiting_.begin()->second;
        waiting_.erase(waiting_.begin());
        there_ -= program_.storage_bytes[storage];
        take({Kind::release, storage, -1});
    }

    void take(const Step& step) {
        found_.steps.push_back(step);
        clock_.take(step);
        if (step.is(Kind::compute) && step.into >= 0) written_[step.into] = true;
        if (step.is(Kind::release)) written_[step.of] = false;
    }

    const Program& program_;
    const Steps& source_;
    const Number budget_;
    const std::vector<Number> levels_;
    Clock clock_;
    Steps found_;
    std::set<std::pair<Number, Index>> waiting_;  // when it is no longer read, storage: freed, but still there
    Number there_ = 0;                            // bytes of these
    std::vector<bool> written_;                   // storages that were written over, and whose frees follow
};

}  // namespace

Placed place(const Program& program, const Steps& steps, Number budget_bytes) {
    Placed best{steps, run(program, steps)};
    const Number most = std::max(budget_bytes, best.run.peak_bytes);
    const std::vector<Number> levels = resident_bytes(program, steps);
    bool placed = false;
    const auto consider = [&](Steps other) {
        const Run found = run(program, other);
        const bool fits = found.peak_bytes <= most && found.time_ns <= best.run.time_ns;
        if (fits && (!placed || found.time_ns < best.run.time_ns)) best = {std::move(other), found}, placed = true;
        return placed && best.run.wait_ns == 0;  // nothing is waited for
    };
    Number largest = 0;
    for (const Step& step : steps.steps) {
        if (step.is(Kind::offload)) largest = std::max(largest, program.storage_bytes[step.of]);
    }
    const bool beside = std::ranges::find(program.beside, true) != program.beside.end();
    for (Number buffers : buffers_tried) {
        if (buffers > 0 && largest == 0) break;
        const Steps kept = without_needless(program, steps, levels, budget_bytes - buffers * largest);
        const Steps late = used(program, LateFrees(program, kept, budget_bytes).run());
        if (consider(with_early(program, late, budget_bytes, false))) break;
        if (!beside) continue;
        if (consider(late) || consider(with_early(program, late, budget_bytes, true))) break;
        const Steps early = with_early(program, kept, budget_bytes, true);
        if (consider(used(program, LateFrees(program, early, budget_bytes).run()))) break;
    }
    return best;
}

}  // namespace lowtide
