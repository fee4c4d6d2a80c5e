"""Parameters that their optimizer updates inside of the backward pass, as soon as their gradients are final.

Each such gradient is no result of the program any more: a ``lowtide.optimizer`` operator reads it and its parameter, writes
the parameter, and the gradient dies there. It stands in the program after the last operator that touches the gradient, and
after the last that may need the parameter as it was: one that reads it, or what forward operators compute again from it.
Backward operators are computed again from parameters, too (the gradient of a matrix product reads the other matrix); those
whose results outlive the update of one that they go back to run ``once``. So no order-preserving schedule can read a parameter
too late, whatever it recomputes: planners need no rule for it, and the checker has its own.

The state that an optimizer keeps for a parameter may lie in a second memory. Then a ``lowtide.fetch_state`` operator, which
needs nothing of the program and may begin early, brings it as one storage, the update reads and writes that as well, and a
``lowtide.store_state`` operator takes it back. Both are ``collective``: they run beside computing, one after the other.

Gradients that something needs all of may go there themselves: a ``lowtide.send_gradient`` operator reads one, which dies there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from lowtide.ir import Graph, Op, Phase, Storage, Value, is_view
from lowtide.ir.graph import FETCH_STATE_TARGET, OPTIMIZER_TARGET, SEND_GRADIENT_TARGET, STORE_STATE_TARGET
from lowtide.program.insertions import Insertion, inserted
from lowtide.program.program import Call, Program, Ref, TensorMeta

Step = Callable[..., Any]
"""Called with a parameter and its gradient, and its state where that is fetched; returns the state."""


class StateMoves(NamedTuple):
    """``fetch(parameter)`` returns the state of a parameter, of so many ``bytes``, from the second memory, and ``store(state)``
    takes it back there."""

    fetch: Callable[[torch.Tensor], Any]
    store: Callable[[Any], None]
    bytes: int


def with_updates(program: Program, steps: Mapping[int, Step], moves: Mapping[int, StateMoves] | None = None) -> Program:
    """``program`` in which ``steps[position]`` updates the parameter that is the flat input ``position``, for those of them
    that have a gradient. A gradient that leaves in terms, or of what the program does not read, stays as it is. The states of
    parameters in ``moves`` are fetched for it and stored."""
    positions = [position for position, _ in program.gradients]
    chosen = {
        position: value
        for position, value in program.gradients
        if position in steps and program.inputs[position] is not None and positions.count(position) == 1
    }
    if not chosen:
        return program
    graph = program.graph
    bits = {graph.values[program.inputs[position]].storage: 1 << position for position in chosen}  # type: ignore[index]
    places = _places(graph, bits, chosen)
    once = _once(graph, bits, places, chosen)
    return _inserted(program, steps, moves or {}, chosen, places, once)


def with_departures(program: Program, positions: Collection[int], send: Step, least_bytes: int) -> Program:
    """``program`` in which gradients of the inputs ``positions`` leave by ``send(gradient, parameter)`` as soon as they are
    final: those of ``least_bytes`` that are laid out as their parameter and share memory with no other result."""
    graph = program.graph
    storages = Counter(graph.values[value].storage for value in (*graph.outputs, *graph.forward_outputs))
    touched, positions_of = _touched(graph), [position for position, _ in program.gradients]
    chosen: dict[int, int] = {}
    found: list[Insertion] = []
    for position, value in program.gradients:
        parameter, storage = program.inputs[position], graph.values[value].storage
        if position not in positions or parameter is None or positions_of.count(position) != 1:
            continue
        meta, own = program.metas[value], program.metas[parameter]
        alone = storages[storage] == 1 and not graph.storages[storage].external
        alike = (meta.shape, meta.stride, meta.dtype) == (own.shape, own.stride, own.dtype)
        whole = meta.storage_bytes == math.prod(meta.shape) * meta.dtype.itemsize >= least_bytes
        if not (alone and alike and whole):
            continue
        chosen[position] = value
        read, name = (value, parameter), program.state_names[position][0]
        beside: dict[str, Any] = {"effect": True, "collective": True, "module": name.rpartition(".")[0]}
        op = Op(-1, f"departure of the gradient of {name}", SEND_GRADIENT_TARGET, read, (), Phase.BACKWARD, **beside)
        found.append(Insertion(touched[storage], op, Call(send, (Ref(value), Ref(parameter)), {}, ())))
    return _without(inserted(program, found), chosen) if chosen else program


def _without(program: Program, chosen: Mapping[int, int]) -> Program:
    """``program``, of whose results the gradients ``chosen``, by position, are none any more."""
    gone = set(chosen.values())
    graph = replace(program.graph, outputs=tuple(value for value in program.graph.outputs if value not in gone))
    gradients = tuple(pair for pair in program.gradients if pair[0] not in chosen)
    return replace(program, graph=graph, gradients=gradients, updated=tuple(sorted(chosen)))


def _touched(graph: Graph) -> dict[int, int]:
    """By storage, the last operator that reads or makes a value in it."""
    return {graph.values[value].storage: op.id for op in graph.ops for value in (*op.inputs, *op.outputs)}


def _places(graph: Graph, bits: Mapping[int, int], chosen: Mapping[int, int]) -> dict[int, int]:
    """By parameter, the operator after which it may be updated."""
    read = _read_again(graph, bits, frozenset(op.id for op in graph.ops if op.phase is Phase.BACKWARD))
    touched = _touched(graph)
    needed: dict[int, int] = {}
    for op in graph.ops:
        if op.phase is Phase.BACKWARD and not is_view(graph, op):
            needed.update((position, op.id) for position in _positions(_of_inputs(graph, op, read)))
    return {
        position: max(touched[graph.values[value].storage], needed.get(position, -1))
        for position, value in chosen.items()
    }


def _once(
    graph: Graph, bits: Mapping[int, int], places: Mapping[int, int], chosen: Mapping[int, int]
) -> frozenset[int]:
    """The backward operators that must not run again: their results are needed after an update of what they go back to. Times
    are pairs: an operator, and after it the parameter that is updated."""
    last_use: dict[int, tuple[int, int]] = {}
    for op in graph.ops:
        last_use.update((graph.values[value].storage, (op.id, -1)) for value in op.inputs)
    last_use.update((graph.values[value].storage, (len(graph.ops), -1)) for value in graph.outputs)
    for position, value in chosen.items():
        last_use[graph.values[value].storage] = (places[position], position)
    found: set[int] = set()
    reaching = dict(bits)
    for op in graph.ops:
        mask = _of_inputs(graph, op, reaching)
        own = {graph.values[value].storage for value in op.outputs}
        if op.phase is Phase.BACKWARD and op.recomputable and not is_view(graph, op):
            until = max((last_use[storage] for storage in own if storage in last_use), default=(-1, -1))
            if any((places[position], position) < until for position in _positions(mask)):
                found.add(op.id)
                continue
        _reach(graph, op, mask, reaching)
    return frozenset(found)


def _read_again(graph: Graph, bits: Mapping[int, int], once: frozenset[int]) -> dict[int, int]:
    """By storage, the parameters (a bit each) that are read when what it holds is computed again."""
    reaching = dict(bits)
    for op in graph.ops:
        if op.id not in once:
            _reach(graph, op, _of_inputs(graph, op, reaching), reaching)
    return reaching


def _reach(graph: Graph, op: Op, mask: int, reaching: dict[int, int]) -> None:
    """``op`` is computed again from the parameters in ``mask``: so are its results, but for what the caller keeps alive."""
    if not op.recomputable:
        return
    handed = {graph.values[value].storage for value in graph.forward_outputs}
    for storage in {graph.values[value].storage for value in op.outputs} - handed:
        reaching[storage] = reaching.get(storage, 0) | mask


def _of_inputs(graph: Graph, op: Op, reaching: Mapping[int, int]) -> int:
    mask = 0
    for value in op.inputs:
        mask |= reaching.get(graph.values[value].storage, 0)
    return mask


def _positions(mask: int) -> list[int]:
    found = []
    while mask:
        found.append((mask & -mask).bit_length() - 1)
        mask &= mask - 1
    return found


def _inserted(
    program: Program,
    steps: Mapping[int, Step],
    moves: Mapping[int, StateMoves],
    chosen: Mapping[int, int],
    places: Mapping[int, int],
    once: frozenset[int],
) -> Program:
    """The program with an operator for each update."""
    found: list[Insertion] = []
    for position in sorted(chosen):
        parameter, gradient = program.inputs[position], chosen[position]
        assert parameter is not None
        name = program.state_names[position][0]
        read, module = (parameter, gradient), name.rpartition(".")[0]
        op = Op(-1, f"update of {name}", OPTIMIZER_TARGET, read, (), Phase.BACKWARD, effect=True, module=module)
        update = Insertion(places[position], op, Call(steps[position], (Ref(parameter), Ref(gradient)), {}, ()))
        if position in moves:
            program, around = _moved(program, update, moves[position])
            found += around
        else:
            found.append(update)
    return _without(inserted(program, found, once), chosen)


def _moved(program: Program, update: Insertion, moves: StateMoves) -> tuple[Program, tuple[Insertion, ...]]:
    """The update of a parameter whose state is fetched and stored, as values of one storage: before it and after it."""
    graph, op, call = program.graph, update.op, update.call
    parameter, storage, before = op.inputs[0], len(graph.storages), len(graph.values)
    after, name = before + 1, op.name.replace("update of", "state of")
    values = (Value(each, name, storage, None, "uint8", (moves.bytes,)) for each in (before, after))
    changed = replace(
        graph,
        values=(*graph.values, *values),
        storages=(*graph.storages, Storage(storage, None, (before, after))),
    )
    meta = TensorMeta((moves.bytes,), (1,), torch.uint8, program.metas[parameter].device, 0, moves.bytes)
    beside: dict[str, Any] = {"phase": Phase.BACKWARD, "collective": True, "module": op.module}
    fetch = Op(-1, f"fetch of the {name}", FETCH_STATE_TARGET, (parameter,), (before,), once=True, **beside)
    store = Op(-1, f"store of the {name}", STORE_STATE_TARGET, (after,), (), effect=True, **beside)
    inside = replace(op, inputs=(*op.inputs, before), outputs=(after,))
    around = (
        Insertion(update.after, fetch, Call(moves.fetch, (Ref(parameter),), {}), (storage,)),
        Insertion(update.after, inside, replace(call, args=(*call.args, Ref(before)), positions=None)),
        Insertion(update.after, store, Call(moves.store, (Ref(after),), {}, ())),
    )
    return replace(program, graph=changed, metas=(*program.metas, meta, meta)), around
