#include "resident.hpp"

#include <algorithm>

namespace lowtide {
namespace {

// By step of a collective beside computing, the later step before which it has certainly ended, whatever the clock says.
class Awaited {
  public:
    Awaited(const Program& program, const Steps& steps)
        : program_(program), ends_(steps.size(), steps.size()), reading_(program.storages(), -1), making_(reading_) {
        for (Index index = 0; index < steps.size(); ++index) {
            Index last = index == steps.boundary ? made_last(program.handed) : -1;
            last = std::max(last, take(steps.steps[index], index));
            while (first_ < pending_.size() && pending_[first_] <= last) ends_[pending_[first_++]] = index;
        }
    }

    Index end(Index index) const { return ends_[index]; }

  private:
    // The last collective that computing waits for here.
    Index take(const Step& step, Index index) {
        if (step.is(Kind::release)) return std::max(making_[step.of], reading_[step.of]);
        if (!step.is(Kind::compute)) return -1;
        if (program_.beside[step.of]) {
            if (step.into >= 0) reading_[step.into] = making_[step.into] = -1;
            for (Index storage : program_.read[step.of]) {
                if (storage != step.into) reading_[storage] = index;
            }
            for (Index storage : program_.changed[step.of]) making_[storage] = index;
            pending_.push_back(index);
            return -1;
        }
        Index last = made_last(program_.touched[step.of]);
        for (Index storage : program_.written[step.of]) last = std::max({last, making_[storage], reading_[storage]});
        return step.into < 0 ? last : std::max({last, making_[step.into], reading_[step.into]});
    }

    Index made_last(Indices storages) const {
        Index last = -1;
        for (Index storage : storages) last = std::max(last, making_[storage]);
        return last;
    }

    const Program& program_;
    std::vector<Index> ends_;
    std::vector<Index> reading_;  // storage: the step of the last collective that reads it
    std::vector<Index> making_;
    std::vector<Index> pending_;  // the steps of collectives, those before `first_` awaited
    std::size_t first_ = 0;
};

}  // namespace

std::vector<Number> resident_bytes(const Program& program, const Steps& steps) {
    std::vector<Number> levels(steps.size() + 2, 0);  // changes, to begin with
    std::vector<bool> live(program.storages(), false);
    std::vector<Index> last_compute(program.operators(), -1);
    std::vector<Index> states(program.operators(), 0);
    bool beside = false;
    for (Index index = 0; index < steps.size(); ++index) {
        const Step& step = steps.steps[index];
        if (!step.is(Kind::compute)) continue;
        last_compute[step.of] = index;
        beside = beside || (program.beside[step.of] && program.workspace_bytes[step.of] > 0);
    }
    const Awaited* awaited = nullptr;
    const Awaited found(program, beside ? steps : Steps{});
    if (beside) awaited = &found;
    levels[0] += program.fixed_bytes;
    for (Index index = 0; index < steps.size(); ++index) {
        const Step& step = steps.steps[index];
        if (step.is(Kind::compute)) {
            if (step.into >= 0 && live[step.into]) {
                live[step.into] = false;
                levels[index] -= program.storage_bytes[step.into];
            }
            for (Index storage : program.owned[step.of]) {
                const Number size = program.storage_bytes[storage];
                levels[index] += size;
                if (live[storage]) levels[index + 1] -= size;  // a second copy
                live[storage] = true;
            }
            levels[index] += program.workspace_bytes[step.of];
            const bool waits = awaited != nullptr && program.beside[step.of];
            levels[waits ? awaited->end(index) : index + 1] -= program.workspace_bytes[step.of];
            if (states[step.of] > 0 && last_compute[step.of] == index) {
                levels[index + 1] -= program.rng_state_bytes;
                states[step.of] = 0;
            }
        } else if (step.is(Kind::fetch)) {
            levels[index] += program.storage_bytes[step.of];
            live[step.of] = true;
        } else if (step.is(Kind::release) && live[step.of]) {
            levels[index + 1] -= program.storage_bytes[step.of];
            live[step.of] = false;
        } else if (step.is(Kind::save_state)) {
            levels[index] += program.rng_state_bytes;
            states[step.of] = 1;
        }
    }
    for (Index index = 1; index <= steps.size(); ++index) levels[index] += levels[index - 1];
    levels.pop_back();
    return levels;
}

}  // namespace lowtide
