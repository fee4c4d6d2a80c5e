// Events that the interpreter tells of (PEP 578), handed on while somebody watches.
//
// A hook stays for the life of the process, and `id` alone tells of each of its calls: one in Python makes that seven times as
// long. This one returns at once while nobody watches.
#pragma once

#include <string>
#include <vector>

#include "python.hpp"

namespace lowtide {

// `function(event, arguments)` is called for these events from now on, between `begin` and `end` of a watch.
void watch_events(std::vector<std::string> events, nb::object function);
void begin_watch();
void end_watch();

// Of a `Py_AuditHookFunction`, which `PySys_AddAuditHook` takes.
std::uintptr_t audit_hook();

}  // namespace lowtide
