// The Python module `lowtide._native`; its types stand in `src/lowtide/_native.pyi`.
#include <algorithm>
#include <iterator>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "allocator.hpp"
#include "arena.hpp"
#include "audit.hpp"
#include "chain.hpp"
#include "device_allocator.hpp"
#include "dual.hpp"
#include "early.hpp"
#include "fit.hpp"
#include "greedy.hpp"
#include "liveness.hpp"
#include "pack.hpp"
#include "placing.hpp"
#include "python.hpp"
#include "resident.hpp"
#include "table.hpp"
#include "unchanged.hpp"

namespace lowtide {
namespace {

auto as_tuple(Candidate found) {
    return nb::make_tuple(array_of(std::move(found.codes)), found.recompute_ns, found.peak_bytes);
}

// A timeline with the moves over it, for tests: `anneal` has its own.
struct Rehearsal {
    Rehearsal(const Graph& graph, const Classes& classes, Index length, Index repeats, const Random& random)
        : classes(classes), random(random), line(graph, length, repeats), moves(line, this->classes, this->random) {}
    Rehearsal(const Rehearsal&) = delete;

    Classes classes;
    Random random;
    Timeline line;
    Moves moves;
};

void bind_search(nb::module_& module) {
    nb::class_<Random>(module, "Random").def(nb::init<std::uint64_t>()).def("below", &Random::below);
    module.def("sweep", [](const Graph& graph, Indices codes) {
        return as_tuple(unlocked([&] { return sweep(graph, codes); }));
    });
    module.def("greedy_sequence", [](const Graph& graph, Number budget, Number most_steps) {
        return array_of(unlocked([&] { return greedy_sequence(graph, budget, most_steps); }));
    });
    module.def("anneal", [](const Graph& graph, const Classes& classes, Indices first, const AnnealSettings& settings,
                            const Random& random) {
        return as_tuple(unlocked([&] { return anneal(graph, classes, first, settings, random); }));
    });
    module.def("memory_path", [](const Graph& graph, const PathQuestion& question) -> nb::object {
        std::optional<MemoryPath> path = unlocked([&] { return memory_path(graph, question); });
        if (!path) return nb::none();
        return nb::make_tuple(path->found, array_of(std::move(path->nodes)), path->recompute_ns);
    });
    module.def("best_splits", [](Numbers times, Index slots) {
        const std::size_t side = times.size() + 1, depth = static_cast<std::size_t>(slots) + 1;
        return array_of(unlocked([&] { return best_splits(times, slots); }), {side, side, depth});
    });
    nb::class_<Profile>(module, "Profile")
        .def(nb::init<Index>())
        .def("add", &Profile::add)
        .def("values", [](const Profile& profile) { return array_of(profile.values()); })
        .def("excess", [](const Profile& profile, Number budget) {
            const Excess excess = profile.excess(budget);
            return std::pair(excess.largest, excess.total);
        })
        .def_prop_ro("peak", &Profile::peak)
        .def_prop_ro("peak_slot", &Profile::peak_slot);
    nb::class_<Rehearsal>(module, "Timeline")
        .def(nb::init<const Graph&, const Classes&, Index, Index, const Random&>(), nb::keep_alive<1, 2>(),
             nb::keep_alive<1, 3>())
        .def("load", [](Rehearsal& self, Indices codes) { self.line.load(codes); })
        .def("next_move", [](Rehearsal& self, bool rejected, Number coin, bool lowering) {
            return self.moves.next(rejected, coin, lowering, true);
        })
        .def("codes", [](const Rehearsal& self) { return array_of(self.line.codes()); })
        .def_prop_ro("recompute_ns", [](const Rehearsal& self) { return self.line.recompute_ns(); })
        .def_prop_ro("profile", [](const Rehearsal& self) -> const Profile& { return self.line.profile(); });
}

void bind_blocks(nb::module_& module) {
    module.def("measure_options", [](const Graph& graph, const BlockSpan& span, const std::vector<Indices>& options) {
        std::vector<Number> rows;
        unlocked([&] {
            for (Indices codes : options) {
                const Measures found = measure_option(graph, span, codes);
                rows.insert(rows.end(), {found.saved_bytes, found.forward_peak_bytes, found.backward_peak_bytes, found.rerun_ns,
                                         found.extra_ns});
            }
        });
        return array_of(std::move(rows), {options.size(), 5});
    });
    module.def("undominated", [](Numbers figures, Index columns) {
        return array_of(unlocked([&] { return undominated(figures, columns); }));
    });
    module.def("lazy_codes", [](const Graph& graph, const BlockSpan& span, Flags kept, bool retain) {
        const Marks marks(kept.begin(), kept.end());
        return array_of(unlocked([&] { return lazy_codes(graph, span, marks, retain); }));
    });
    module.def("shrinking_sets", [](const Graph& graph, const BlockSpan& span, double weight) {
        const std::vector<Marks> rows = unlocked([&] { return shrinking_sets(graph, span, weight); });
        std::vector<std::uint8_t> flags;
        for (const Marks& row : rows) flags.insert(flags.end(), row.begin(), row.end());
        const nb::object array = nb::cast(array_of(std::move(flags), {rows.size(), rows.front().size()}));
        return nb::object(array.attr("view")("bool"));
    });
    module.def("fill_table", [](Numbers forward_ns, Numbers crossing, Numbers forward_peak, Numbers gradients, Numbers start,
                                Numbers saved, Numbers option_forward_peak, Numbers option_backward_peak, Numbers rerun_ns,
                                Numbers extra_ns, Index size) {
        const TableCosts costs{forward_ns,          crossing,             forward_peak, gradients, start, saved,
                               option_forward_peak, option_backward_peak, rerun_ns,     extra_ns};
        Table table = unlocked([&] { return fill_table(costs, size); });
        const std::size_t side = forward_ns.size() + 1, slots = size;
        return nb::make_tuple(array_of(std::move(table.best_ns), {side, side, slots}),
                              array_of(std::move(table.choice), {side, side, slots}));
    });
    module.def("chain_way", [](const ChainCosts& costs) {
        const Way way = unlocked([&] { return chain_way(costs); });
        std::vector<Index> rows;
        for (const Segment& one : way.segments) rows.insert(rows.end(), {one.low, one.high, one.slots, one.moved, one.first});
        return nb::make_tuple(way.time_ns, array_of(std::move(rows), {way.segments.size(), 5}));
    });
}

void bind_bounds(nb::module_& module) {
    module.def("close_slots", [](const Graph& graph, Number room, Numbers until, int rounds) {
        Liveness found = unlocked([&] { return close_slots(graph, room, until, rounds); });
        const std::size_t nodes = graph.nodes, storages = graph.storages(), slots = nodes + 2;
        return nb::make_tuple(array_of(std::move(found.open), {nodes, slots}),
                              array_of(std::move(found.certain), {storages, slots}),
                              array_of(std::move(found.instant_bytes)));
    });
    nb::class_<Matrix>(module, "Matrix").def(nb::init<Indices, Indices, Floats, Index>());
    module.def("ascend", [](const Matrix& matrix, Floats cost, Floats right, Floats lower, Floats upper, Floats x, Floats y,
                            double weight, Number iterations) {
        Dual found = unlocked([&] {
            return ascend(matrix, {cost, right, lower, upper}, {x.begin(), x.end()}, {y.begin(), y.end()}, weight,
                          iterations);
        });
        return nb::make_tuple(found.bound, array_of(std::move(found.x)), array_of(std::move(found.y)), found.weight);
    });
}

auto as_tuple(const Run& run) {
    return nb::make_tuple(run.time_ns, run.wait_ns, run.peak_bytes, run.second_peak_bytes);
}

void bind_steps(nb::module_& module) {
    module.def("run_steps", [](const Program& program, const Steps& steps) {
        return as_tuple(unlocked([&] { return run(program, steps); }));
    });
    module.def("starts_of", [](const Program& program, const Steps& steps) {
        return array_of(unlocked([&] { return starts_of(program, steps, false); }));
    });
    module.def("resident_bytes", [](const Program& program, const Steps& steps) {
        return array_of(unlocked([&] { return resident_bytes(program, steps); }));
    });
    module.def("place_steps", [](const Program& program, const Steps& steps, Number budget_bytes) {
        Placed found = unlocked([&] { return place(program, steps, budget_bytes); });
        std::vector<Index> rows;
        for (const Step& step : found.steps.steps) rows.insert(rows.end(), {static_cast<Index>(step.kind), step.of, step.into});
        const std::size_t count = found.steps.steps.size();
        return nb::make_tuple(array_of(std::move(rows), {count, 3}), found.steps.boundary, as_tuple(found.run));
    });
    module.def("movable_steps", [](const Program& program, const Steps& steps) {
        std::vector<Index> rows;
        for (const Item& item : unlocked([&] { return movable(program, steps); })) {
            rows.insert(rows.end(), {item.position, static_cast<Index>(item.lane), item.low});
        }
        const std::size_t count = rows.size() / 3;
        return array_of(std::move(rows), {count, 3});
    });
}

void bind_placement(nb::module_& module) {
    nb::class_<Buffers>(module, "Buffers")
        .def(nb::init<Indices, Indices, Numbers>())
        .def("fit", [](const Buffers& self, Indices order, int rule) {
            return array_of(unlocked([&] { return fit(self, order, static_cast<Rule>(rule)); }));
        })
        .def("pack", [](const Buffers& self, Indices rank, Number capacity, Number most_visits, double most_seconds) {
            Packing found = unlocked([&] { return pack(self, rank, capacity, most_visits, most_seconds); });
            return nb::make_tuple(static_cast<int>(found.status), array_of(std::move(found.offsets)),
                                  array_of(std::move(found.blame)), found.visits);
        });
}

// What is asked for room, as a Python function. Blocks may be allocated while the interpreter ends, so it is never freed.
nb::object& room_maker() {
    static auto* function = new nb::object();
    return *function;
}

bool make_room(Number bytes) {
    const nb::gil_scoped_acquire locked;
    const nb::object function = room_maker();
    if (!function.is_valid() || function.is_none()) return true;
    try {
        return nb::cast<bool>(function(bytes));
    } catch (nb::python_error& error) {
        if (error.matches(PyExc_KeyboardInterrupt)) {
            PyErr_SetInterrupt();  // it struck before the function could catch it: Python raises it soon
        } else {
            error.discard_as_unraisable("lowtide's allocation counter");
        }
        return false;
    }
}

template <class Target>
Target at_address(std::uintptr_t address) {
    return reinterpret_cast<Target>(address);
}

AllocatorAccess access_at(std::pair<std::uintptr_t, std::uintptr_t> functions) {
    return {at_address<void* (*)()>(functions.first), at_address<void (*)(void*, std::uint8_t)>(functions.second)};
}

void bind_counter(nb::module_& module) {
    nb::class_<Counter>(module, "AllocationCounter")
        .def("__init__", [](Counter* self, int bits) { new (self) Counter(bits, make_room); })
        .def("enter", [](Counter& self, std::uintptr_t block, Number bytes) {
            return self.enter(at_address<void*>(block), bytes);
        })
        .def("leave", [](Counter& self, std::uintptr_t block) { self.leave(at_address<void*>(block)); })
        .def_prop_ro("level_bytes", &Counter::level)
        .def_prop_ro("peak_bytes", &Counter::peak)
        .def_prop_ro("uncounted_blocks", &Counter::uncounted)
        .def_prop_ro("reserved_bytes", &Counter::reserved)
        .def_prop_ro("reserved_peak_bytes", &Counter::reserved_peak)
        .def_prop_ro("reserved_ahead_bytes", &Counter::ahead)
        .def("reset_reserved_peak", &Counter::reset_reserved_peak)
        .def("raise_reserved_peak", &Counter::raise_reserved_peak)
        .def("reset_peak", &Counter::reset_peak)
        .def("raise_peak", &Counter::raise_peak)
        .def("limit", [](Counter& self, std::optional<Number> bytes, nb::object function) {
            room_maker() = std::move(function);
            self.set_limit(bytes.value_or(Counter::no_limit));
        }, nb::arg("limit_bytes").none(), nb::arg("make_room").none() = nb::none())
        .def_prop_rw("limited_thread", &Counter::limited_thread, &Counter::set_limited_thread)
        .def("start_log", &Counter::start_log)
        .def("stop_log", [](Counter& self) { return unlocked([&] { return self.stop_log(); }); });
    module.def("install_counter", [](std::pair<std::uintptr_t, std::uintptr_t> functions, std::uintptr_t storage,
                                     std::uintptr_t data) -> Counter& {
        return install_counter(access_at(functions), at_address<void*>(storage), at_address<void*>(data), make_room);
    }, nb::rv_policy::reference);
    module.def("uninstall_counter", [](std::pair<std::uintptr_t, std::uintptr_t> functions) {
        uninstall_counter(access_at(functions));
    });
}

using Pair = std::pair<Number, Number>;
using OperatorRow = std::tuple<std::vector<Pair>, std::vector<Pair>, Pair>;

Place place_of(const Pair& pair) {
    return {pair.first, pair.second};
}

std::vector<Place> places_of(const std::vector<Pair>& pairs) {
    std::vector<Place> places;
    std::ranges::transform(pairs, std::back_inserter(places), place_of);
    return places;
}

void bind_arena(nb::module_& module) {
    nb::class_<DeviceMemory>(module, "DeviceMemory")
        .def_prop_ro("reserved_bytes", &DeviceMemory::reserved)
        .def_prop_ro("used_bytes", &DeviceMemory::used);
    module.def("new_device_memory", [] { return new DeviceMemory(); }, nb::rv_policy::reference);
    module.def("install_device_allocator", [](std::uintptr_t allocator, std::uintptr_t storage, std::uintptr_t data, Number granularity) {
        install_device_allocator(at_address<void*>(allocator), at_address<void*>(storage), at_address<void*>(data), granularity);
    });
    module.def("uninstall_device_allocator", &uninstall_device_allocator);
    nb::class_<Arena>(module, "Arena")
        .def("__init__", [](Arena* self) { new (self) Arena(host_memory()); })
        .def("__init__", [](Arena* self, DeviceMemory& memory) { new (self) Arena(memory); })
        .def("reserve", [](Arena& self, Number bytes) { return unlocked([&] { return self.reserve(bytes); }); })
        .def_prop_ro("reserved_bytes", &Arena::bytes)
        .def_prop_ro("counts", [](const Arena& self) {
            const ArenaCounts counts = self.counts();
            return nb::make_tuple(counts.placed, counts.taken, counts.crowded, counts.unexpected);
        });
    nb::class_<AddressTable>(module, "AddressTable")
        .def("__init__", [](AddressTable* self, std::shared_ptr<Arena> arena, const std::vector<OperatorRow>& rows) {
            std::vector<OperatorPlaces> places;
            for (const auto& [tensors, copies, workspace] : rows) {
                places.push_back({places_of(tensors), places_of(copies), place_of(workspace)});
            }
            new (self) AddressTable(std::move(arena), std::move(places));
        })
        .def("reserve", [](AddressTable& self) { return unlocked([&] { return self.reserve(); }); })
        .def("begin", &AddressTable::begin)
        .def_static("end", &AddressTable::end)
        .def_static("is_learning", &AddressTable::is_learning)
        .def_static("made", [](const std::vector<std::uintptr_t>& addresses) { AddressTable::made(addresses); });
}

void bind_audit(nb::module_& module) {
    module.def("watch_events", &watch_events);
    module.def("begin_watch", &begin_watch);
    module.def("end_watch", &end_watch);
    module.def("audit_hook", &audit_hook);
}

void bind_unchanged(nb::module_& module) {
    module.def("are_of_types", &are_of_types);
    module.def("have_dictionaries", &have_dictionaries);
    module.def("have_attributes", &have_attributes);
    module.def("have_items", &have_items);
    module.def("have_no_items", &have_no_items);
    module.def("are_empty", &are_empty);
    module.def("have_values", &have_values);
}

}  // namespace
}  // namespace lowtide

NB_MODULE(_native, module) {
    nanobind::set_leak_warnings(false);  // models that modules hold when the interpreter ends
    module.attr("built_for") = nanobind::make_tuple(LOWTIDE_VERSION, LOWTIDE_INTERFACE);
    module.attr("sources") = LOWTIDE_SOURCES;
    lowtide::bind_search(module);
    lowtide::bind_blocks(module);
    lowtide::bind_bounds(module);
    lowtide::bind_steps(module);
    lowtide::bind_placement(module);
    lowtide::bind_counter(module);
    lowtide::bind_arena(module);
    lowtide::bind_audit(module);
    lowtide::bind_unchanged(module);
}
