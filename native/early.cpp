#include "early.hpp"

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include "resident.hpp"

namespace lowtide {
namespace {

class Items {
  public:
    Items(const Program& program, const Steps& steps)
        : program_(program), steps_(steps), freed_(program.storages(), 0), made_(values_of(program), 0),
          computed_(program.operators(), false) {
        for (Index index = 0; index < steps.size(); ++index) {
            const Step& step = steps.steps[index];
            if (step.is(Kind::release)) {
                freed_[step.of] = index + 1;
            } else if (step.is(Kind::fetch)) {
                const Number size = program.storage_bytes[step.of];
                found_.push_back({index, Lane::fetch, program.fetch_ns[step.of], size, freed_[step.of]});
                make(program.values[step.of], index);
            } else if (step.is(Kind::compute)) {
                compute(step, index);
            }
        }
    }

    std::vector<Item> found() { return std::move(found_); }

  private:
    static Index values_of(const Program& program) {
        Index count = 0;
        for (Index value : program.inputs.entries) count = std::max(count, value + 1);
        for (Index value : program.outputs.entries) count = std::max(count, value + 1);
        for (Index value : program.values.entries) count = std::max(count, value + 1);
        return count;
    }

    void compute(const Step& step, Index index) {
        if (program_.beside[step.of]) {
            Number size = program_.workspace_bytes[step.of];
            for (Index storage : program_.owned[step.of]) size += program_.storage_bytes[storage];
            found_.push_back({index, Lane::collective, program_.time_ns[step.of], size, lowest(step, index)});
        }
        if (program_.holds[step.of]) effect_ = index + 1;
        computed_[step.of] = true;
        make(program_.outputs[step.of], index);
        if (program_.changes[step.of]) make(program_.inputs[step.of], index);
    }

    // The first step that the collective can come before.
    Index lowest(const Step& step, Index index) const {
        const bool first = !computed_[step.of];
        const bool moves = first ? program_.early[step.of] : program_.again[step.of];
        if (!moves || step.into >= 0 || program_.owned.size(step.of) == 0) return index;
        Index low = std::max(index >= steps_.boundary ? steps_.boundary : 0, first ? effect_ : 0);
        for (Index value : program_.inputs[step.of]) low = std::max(low, made_[value]);
        for (Index storage : program_.owned[step.of]) low = std::max(low, freed_[storage]);
        return low;
    }

    void make(Indices values, Index index) {
        for (Index value : values) made_[value] = index + 1;
    }

    const Program& program_;
    const Steps& steps_;
    std::vector<Index> freed_;  // storage: after its latest free
    std::vector<Index> made_;   // value: after the step that made it last
    std::vector<bool> computed_;
    Index effect_ = 0;  // after the latest effect that a collective stays behind
    std::vector<Item> found_;
};

// When each has to begin so that it, and all that follow on its lane, end where they stand now.
std::vector<Number> latest_starts(const std::vector<Item>& items, const std::vector<Number>& starts) {
    std::array<Number, lane_count> after;
    after.fill(std::numeric_limits<Number>::max());
    std::vector<Number> found(items.size());
    for (std::size_t number = items.size(); number-- > 0;) {
        Number& next = after[static_cast<std::size_t>(items[number].lane)];
        next = std::min(starts[items[number].position], next) - items[number].time_ns;
        found[number] = next;
    }
    return found;
}

// With the steps of each list before the step at its index.
Steps reordered(const Steps& source, const std::vector<std::vector<Index>>& moved) {
    std::vector<bool> taken(source.steps.size(), false);
    for (const std::vector<Index>& indices : moved) {
        for (Index index : indices) taken[index] = true;
    }
    Steps found;
    found.steps.reserve(source.steps.size());
    found.boundary = source.size();
    for (Index index = 0; index < source.size(); ++index) {
        if (index == source.boundary) found.boundary = found.size();
        for (Index one : moved[index]) found.steps.push_back(source.steps[one]);
        if (!taken[index]) found.steps.push_back(source.steps[index]);
    }
    return found;
}

}  // namespace

std::vector<Item> movable(const Program& program, const Steps& steps) { return Items(program, steps).found(); }

Steps with_early(const Program& program, const Steps& steps, Number budget_bytes, bool just_in_time) {
    const std::vector<Item> items = movable(program, steps);
    if (items.empty()) return steps;
    const std::vector<Number> starts = starts_of(program, steps, true);
    const std::vector<Number> latest = just_in_time ? latest_starts(items, starts) : std::vector<Number>(items.size(), 0);
    std::vector<Number> levels = resident_bytes(program, steps);
    std::vector<std::vector<Index>> moved(steps.steps.size());
    std::array<Number, lane_count> ends{};
    std::array<Index, lane_count> first{};
    for (std::size_t number = 0; number < items.size(); ++number) {
        const Item& item = items[number];
        Number& end = ends[static_cast<std::size_t>(item.lane)];
        Index& behind = first[static_cast<std::size_t>(item.lane)];
        const Index low = std::max(item.low, behind);
        // During this step its lane is free.
        const auto idle = std::ranges::upper_bound(starts, std::max(end, latest[number])) - starts.begin() - 1;
        const Index least = std::max(low, std::min(static_cast<Index>(idle), item.position));
        Index place = item.position;
        while (place > least && levels[place - 1] + item.bytes <= budget_bytes) --place;
        while (place < item.position && !steps.may_precede(place)) ++place;
        const bool stays = place == item.position && item.lane == Lane::collective;  // what it writes over is freed next
        if (!stays) moved[place].push_back(item.position);
        for (Index index = place; index < item.position; ++index) levels[index] += item.bytes;
        end = std::max(end, starts[place]) + item.time_ns;
        behind = place + (stays ? 1 : 0);
    }
    return reordered(steps, moved);
}

}  // namespace lowtide
