// Random numbers: the splitmix64 generator (Steele, Lea and Flood, OOPSLA 2014).
#pragma once

#include <cstdint>

namespace lowtide {

class Random {
public:
    explicit Random(std::uint64_t state) : state_(state) {}

    // A number from 0 to `bound` - 1.
    std::int64_t below(std::int64_t bound) {
        state_ += 0x9E3779B97F4A7C15;
        std::uint64_t mixed = state_;
        mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9;
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB;
        mixed ^= mixed >> 31;
        return static_cast<std::int64_t>((mixed >> 32) * static_cast<std::uint64_t>(bound) >> 32);
    }

private:
    std::uint64_t state_;
};

}  // namespace lowtide
