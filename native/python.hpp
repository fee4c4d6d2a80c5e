// How Python's objects become the kernels' arguments, and their results Python's: arrays as spans over the same memory, named
// tuples of arrays as structs of spans, vectors as arrays. Nothing is copied on the way in, and nothing converted: an array
// of another type is a TypeError.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstring>
#include <span>
#include <stdexcept>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "anneal.hpp"
#include "blocks.hpp"
#include "chain.hpp"
#include "counter.hpp"
#include "graph.hpp"
#include "memory_paths.hpp"
#include "steps.hpp"

namespace lowtide {

namespace nb = nanobind;

// Whether an array with this format of Python's buffer protocol holds elements of type T.
template <class T>
bool holds(const Py_buffer& view) {
    const std::string_view codes = std::is_same_v<T, bool>          ? "?"
                                   : std::is_floating_point_v<T>    ? "d"
                                   : std::is_unsigned_v<T>          ? "BHILQ"
                                                                    : "bhilq";
    const bool known = view.format != nullptr && std::strlen(view.format) == 1;
    return known && view.itemsize == sizeof(T) && codes.find(view.format[0]) != std::string_view::npos;
}

// The memory of an array with elements in a row; whoever calls keeps the array alive.
template <class T>
std::span<T> span_of(nb::handle array) {
    Py_buffer view;
    const int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (std::is_const_v<T> ? 0 : PyBUF_WRITABLE);
    if (PyObject_GetBuffer(array.ptr(), &view, flags) != 0) {
        PyErr_Clear();
        throw nb::type_error("an array was expected whose numbers follow one another");
    }
    const bool right = holds<std::remove_const_t<T>>(view);
    const std::span<T> span(static_cast<T*>(view.buf), view.len / sizeof(T));
    PyBuffer_Release(&view);
    if (!right) throw nb::type_error("an array of another type of numbers was expected");
    return span;
}

template <class T>
std::span<const T> column(nb::handle table, const char* name) {
    return span_of<const T>(nb::object(table.attr(name)));
}

template <class T>
T number(nb::handle table, const char* name) {
    return nb::cast<T>(table.attr(name));
}

inline Ragged ragged(nb::handle table, const char* start, const char* entries) {
    return {column<Index>(table, start), column<Index>(table, entries)};
}

inline void read(nb::handle table, Graph& graph) {
    graph = {
        .nodes = number<Index>(table, "nodes"),
        .boundary = number<Index>(table, "boundary"),
        .rng_state_bytes = number<Number>(table, "rng_state_bytes"),
        .time_ns = column<Number>(table, "time_ns"),
        .workspace_bytes = column<Number>(table, "workspace_bytes"),
        .recomputable = column<bool>(table, "recomputable"),
        .random = column<bool>(table, "random"),
        .reads = ragged(table, "reads_start", "reads"),
        .read_node = column<Index>(table, "read_node"),
        .gaps = column<Index>(table, "gaps"),
        .owns = ragged(table, "owns_start", "owns"),
        .needs = ragged(table, "needs_start", "needs"),
        .overs = ragged(table, "overs_start", "overs"),
        .views = ragged(table, "views_start", "views"),
        .view_time_ns = column<Number>(table, "view_time_ns"),
        .view_storage = column<Index>(table, "view_storage"),
        .needers = ragged(table, "needers_start", "needers"),
        .storage_bytes = column<Number>(table, "storage_bytes"),
        .storage_node = column<Index>(table, "storage_node"),
        .uses = ragged(table, "uses_start", "uses"),
        .handed = column<bool>(table, "handed"),
        .held = column<bool>(table, "held"),
        .overwritten = column<bool>(table, "overwritten"),
    };
}

inline void read(nb::handle table, Program& program) {
    program = {
        .fixed_bytes = number<Number>(table, "fixed_bytes"),
        .rng_state_bytes = number<Number>(table, "rng_state_bytes"),
        .shared = number<bool>(table, "shared"),
        .time_ns = column<Number>(table, "time_ns"),
        .workspace_bytes = column<Number>(table, "workspace_bytes"),
        .storage_bytes = column<Number>(table, "storage_bytes"),
        .offload_ns = column<Number>(table, "offload_ns"),
        .fetch_ns = column<Number>(table, "fetch_ns"),
        .beside = column<bool>(table, "beside"),
        .changes = column<bool>(table, "changes"),
        .holds = column<bool>(table, "holds"),
        .early = column<bool>(table, "early"),
        .again = column<bool>(table, "again"),
        .handed = column<Index>(table, "handed"),
        .owned = ragged(table, "owned_start", "owned"),
        .read = ragged(table, "read_start", "read"),
        .changed = ragged(table, "changed_start", "changed"),
        .touched = ragged(table, "touched_start", "touched"),
        .written = ragged(table, "written_start", "written"),
        .inputs = ragged(table, "inputs_start", "inputs"),
        .outputs = ragged(table, "outputs_start", "outputs"),
        .values = ragged(table, "values_start", "values"),
    };
}

inline void read(nb::handle table, Steps& steps) {
    const Indices numbers = column<Index>(table, "rows");
    const auto* first = reinterpret_cast<const Step*>(numbers.data());
    steps = {{first, first + numbers.size() / 3}, number<Index>(table, "boundary")};
}

inline void read(nb::handle table, ChainCosts& costs) {
    costs = {
        .slots = number<Index>(table, "slots"),
        .room = number<double>(table, "room"),
        .unit_bytes = number<double>(table, "unit_bytes"),
        .leave_rate = number<double>(table, "leave_rate"),
        .come_rate = number<double>(table, "come_rate"),
        .cells = number<Index>(table, "cells"),
        .best_ns = column<Number>(table, "best_ns"),
        .crossing = column<Number>(table, "crossing"),
        .forward_peak = column<Number>(table, "forward_peak"),
        .start = column<Number>(table, "start"),
        .saved = column<Number>(table, "saved"),
        .option_forward_peak = column<Number>(table, "option_forward_peak"),
        .option_backward_peak = column<Number>(table, "option_backward_peak"),
        .extra_ns = column<Number>(table, "extra_ns"),
        .forward_ns = column<double>(table, "forward_ns"),
        .backward_ns = column<double>(table, "backward_ns"),
    };
}

inline void read(nb::handle table, Classes& classes) {
    classes = {column<Index>(table, "number"), ragged(table, "start", "members")};
}

inline void read(nb::handle table, AnnealSettings& settings) {
    settings = {
        .budget_bytes = number<Number>(table, "budget_bytes"),
        .iterations = number<Number>(table, "iterations"),
        .hot = number<double>(table, "hot"),
        .cold = number<double>(table, "cold"),
        .pressure = number<double>(table, "pressure"),
        .time_weight = number<double>(table, "time_weight"),
        .lower = number<double>(table, "lower"),
        .target_bytes = number<Number>(table, "target_bytes"),
        .target_ns = number<Number>(table, "target_ns"),
        .rate = number<double>(table, "rate"),
    };
}

inline void read(nb::handle table, PathQuestion& question) {
    question = {
        .room = number<Number>(table, "room"),
        .below_ns = number<Number>(table, "below_ns"),
        .any_path = number<bool>(table, "any_path"),
        .states = number<Number>(table, "states"),
        .edges = number<Number>(table, "edges"),
        .comparisons = number<Number>(table, "comparisons"),
        .node_until = column<Index>(table, "node_until"),
        .storage_until = column<Index>(table, "storage_until"),
    };
}

inline void read(nb::handle table, BlockSpan& span) {
    span = {
        .low = number<Index>(table, "low"),
        .high = number<Index>(table, "high"),
        .first = number<Index>(table, "first"),
        .last = number<Index>(table, "last"),
        .counted = column<bool>(table, "counted"),
        .leaves = column<bool>(table, "leaves"),
        .late = column<bool>(table, "late"),
        .before = column<Number>(table, "before"),
        .during = column<Number>(table, "during"),
    };
}

inline void read(nb::handle log, std::span<LogEntry>& entries) {
    const std::span<Number> numbers = span_of<Number>(log);
    entries = {reinterpret_cast<LogEntry*>(numbers.data()), numbers.size() / 2};
}

template <class T>
void read(nb::handle array, std::span<const T>& span) {
    span = span_of<const T>(array);
}

// An array that owns the numbers.
template <class T>
auto array_of(std::vector<T> numbers, std::initializer_list<std::size_t> shape) {
    auto* kept = new std::vector<T>(std::move(numbers));
    const nb::capsule owner(kept, [](void* vector) noexcept { delete static_cast<std::vector<T>*>(vector); });
    return nb::ndarray<nb::numpy, T>(kept->data(), shape, owner);
}

template <class T>
auto array_of(std::vector<T> numbers) {
    const std::size_t count = numbers.size();
    return array_of(std::move(numbers), {count});
}

// Runs a kernel while other threads may have the interpreter.
template <class Kernel>
auto unlocked(Kernel kernel) {
    const nb::gil_scoped_release released;
    return kernel();
}

// What of the above is read from Python.
template <class T>
concept Readable = requires(nb::handle source, T& value) { lowtide::read(source, value); };

}  // namespace lowtide

namespace nanobind::detail {

template <class T>
    requires lowtide::Readable<T>
struct type_caster<T> {
    NB_TYPE_CASTER(T, const_name("object"))

    bool from_python(handle source, std::uint8_t, cleanup_list*) {
        lowtide::read(source, value);
        return true;
    }
};

}  // namespace nanobind::detail
