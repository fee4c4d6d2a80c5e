// What is allocated while a schedule runs: the bytes of `lowtide.ir.simulator`.
#pragma once

#include <vector>

#include "steps.hpp"

namespace lowtide {

// Bytes resident during each step and, as one more number, after the last.
std::vector<Number> resident_bytes(const Program& program, const Steps& steps);

}  // namespace lowtide
