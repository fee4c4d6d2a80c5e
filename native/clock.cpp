#include "clock.hpp"

#include <algorithm>

#include "resident.hpp"

namespace lowtide {
namespace {

// The most bytes of copies at once.
Number second_peak(const Program& program, const Steps& steps) {
    std::vector<Index> last(program.storages(), -1);
    for (Index index = 0; index < steps.size(); ++index) {
        if (steps.steps[index].is(Kind::fetch)) last[steps.steps[index].of] = index;
    }
    Number held = 0, peak = 0;
    for (Index index = 0; index < steps.size(); ++index) {
        const Step& step = steps.steps[index];
        if (step.is(Kind::offload)) {
            held += program.storage_bytes[step.of];
            peak = std::max(peak, held);
        } else if (step.is(Kind::fetch) && last[step.of] == index) {
            held -= program.storage_bytes[step.of];
        }
    }
    return peak;
}

}  // namespace

Clock::Clock(const Program& program, bool at_once)
    : program_(program), at_once_(at_once), read_until_(program.storages(), 0), made_at_(program.storages(), 0) {}

Number Clock::readable(Indices storages) const {
    Number ready = 0;
    for (Index storage : storages) ready = std::max(ready, made_at_[storage]);
    return ready;
}

Number Clock::releasable(Index storage) const { return std::max(made_at_[storage], read_until_[storage]); }

void Clock::hand_over() { now_ = std::max(now_, readable(program_.handed)); }

void Clock::finish() { now_ = std::max(now_, *std::ranges::max_element(lanes_)); }

void Clock::take(const Step& step) {
    Number ready = 0;
    if (step.is(Kind::compute)) {
        ready = readable(program_.touched[step.of]);
        for (Index storage : program_.written[step.of]) ready = std::max(ready, releasable(storage));
        if (step.into >= 0) ready = std::max(ready, releasable(step.into));
    } else if (step.is(Kind::offload)) {
        ready = made_at_[step.of];
    } else if (!step.of_state()) {
        ready = releasable(step.of);
    }
    const bool moves = step.is(Kind::offload) || step.is(Kind::fetch);
    const bool communicates = step.is(Kind::compute) && program_.beside[step.of];
    if (!moves && !communicates) now_ = std::max(now_, ready);
    asked_ = now_;
    if (moves) {
        move(step, ready);
    } else if (communicates) {
        communicate(step, ready);
    } else if (step.is(Kind::compute)) {
        now_ += program_.time_ns[step.of];
        computing_ += program_.time_ns[step.of];
        forget(step.into);
    }
}

void Clock::move(const Step& step, Number ready) {
    const bool back = step.is(Kind::fetch);
    Number& lane = lanes_[static_cast<std::size_t>(back ? Lane::fetch : Lane::offload)];
    const Number other = lanes_[static_cast<std::size_t>(back ? Lane::offload : Lane::fetch)];
    const Number start = std::max({now_, ready, lane, program_.shared ? other : 0});
    lane = start + (back ? (at_once_ ? 0 : program_.fetch_ns[step.of]) : program_.offload_ns[step.of]);
    Number& end = (back ? made_at_ : read_until_)[step.of];
    end = std::max(end, lane);
}

void Clock::communicate(const Step& step, Number ready) {
    Number& lane = lanes_[static_cast<std::size_t>(Lane::collective)];
    lane = std::max({now_, ready, lane}) + (at_once_ ? 0 : program_.time_ns[step.of]);
    forget(step.into);
    for (Index storage : program_.read[step.of]) {
        if (storage != step.into) read_until_[storage] = std::max(read_until_[storage], lane);
    }
    for (Index storage : program_.changed[step.of]) made_at_[storage] = lane;
}

void Clock::forget(Index storage) {
    if (storage >= 0) made_at_[storage] = read_until_[storage] = 0;
}

std::vector<Number> starts_of(const Program& program, const Steps& steps, bool at_once) {
    std::vector<Number> starts;
    starts.reserve(steps.steps.size() + 1);
    Clock clock(program, at_once);
    for (Index index = 0; index < steps.size(); ++index) {
        if (index == steps.boundary) clock.hand_over();
        clock.take(steps.steps[index]);
        starts.push_back(clock.asked());
    }
    clock.finish();
    starts.push_back(clock.now());
    return starts;
}

Run run(const Program& program, const Steps& steps) {
    Clock clock(program);
    for (Index index = 0; index < steps.size(); ++index) {
        if (index == steps.boundary) clock.hand_over();
        clock.take(steps.steps[index]);
    }
    clock.finish();
    const std::vector<Number> levels = resident_bytes(program, steps);
    const Number peak = *std::max_element(levels.begin(), levels.end() - 1);
    return {clock.now(), clock.now() - clock.computing(), std::max(peak, program.fixed_bytes), second_peak(program, steps)};
}

}  // namespace lowtide
