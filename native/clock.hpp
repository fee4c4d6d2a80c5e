// When steps run, and what is under way beside them, in exact nanoseconds: the clock of `lowtide.ir.transfers`.
#pragma once

#include <array>
#include <vector>

#include "steps.hpp"

namespace lowtide {

enum class Lane : Index { offload, fetch, collective };
inline constexpr std::size_t lane_count = 3;

class Clock {
  public:
    // `at_once`: transfers back and collectives take no time.
    explicit Clock(const Program& program, bool at_once = false);

    void take(const Step& step);
    void hand_over();
    void finish();  // wait for all that is under way

    // When storages are there to be read, and when one may be written into or released.
    Number readable(Indices storages) const;
    Number releasable(Index storage) const;

    Number now() const { return now_; }
    Number asked() const { return asked_; }  // when the latest step was taken
    Number computing() const { return computing_; }  // how long anything was computed

  private:
    void move(const Step& step, Number ready);
    void communicate(const Step& step, Number ready);
    void forget(Index storage);

    const Program& program_;
    bool at_once_;
    Number now_ = 0, asked_ = 0, computing_ = 0;
    std::array<Number, lane_count> lanes_{};  // when the latest on each has ended
    std::vector<Number> read_until_;          // storage: when the last that reads it beside computing has ended
    std::vector<Number> made_at_;             // storage: when what makes it beside computing has ended
};

struct Run {
    Number time_ns = 0;
    Number wait_ns = 0;
    Number peak_bytes = 0;
    Number second_peak_bytes = 0;
};

// When each step is asked for and, as one more number, when all has ended.
std::vector<Number> starts_of(const Program& program, const Steps& steps, bool at_once);

Run run(const Program& program, const Steps& steps);

}  // namespace lowtide
