"""Parameters that their optimizer updates inside the backward pass, as soon as their gradients are final.

Such a gradient is no longer a result of the program. A ``lowtide.optimizer`` operator reads the gradient and the
parameter, and writes the parameter; then the gradient is freed. The operator stands after the last operator that
touches the gradient, and after the last one that may need the old parameter: operators that read it, or that read what
forward operators compute again from it. Backward operators are computed again from parameters too (the gradient of a
matrix product reads the other matrix); if their results are needed after the update of a parameter that they depend on,
they run ``once``. So no order-preserving schedule can read a parameter too late, whatever it recomputes. Planners need
no rule for this; the checker has one of its own.

The optimizer's state for a parameter may lie in a second memory. Then a ``lowtide.fetch_state`` operator, which needs
nothing of the program and may begin early, brings it as one storage. The update reads and writes it, and a
``lowtide.store_state`` operator takes it back. Both are ``collective``: they run beside computing, one after the other.

Gradients that something needs all together can go there themselves: a ``lowtide.send_gradient`` operator reads one, and
then it is freed.
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
    """``fetch(parameter)`` returns the state of a parameter (``bytes``) from the second memory; ``store(state)`` takes
    it back."""

    fetch: Callable[[torch.Tensor], Any]
    store: Callable[[Any], None]
    bytes: int


def with_updates(program: Program, steps: Mapping[int, Step], moves: Mapping[int, StateMoves] | None = None) -> Program:
    """``program`` in which ``steps[position]`` updates the parameter that is flat input ``position``, if it has a
    gradient. Gradients that leave as separate terms, or of parameters that the program does not read, stay as they
    are. The states of parameters in ``moves`` are fetched and stored."""
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
    """``program`` in which gradients of the inputs ``positions`` leave by ``send(gradient, parameter)`` as soon as they
    are final: those of at least ``least_bytes`` that have the layout of their parameter and share memory with no
    other result."""
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
    """``program`` without the ``chosen`` gradients (by position) among its results."""
    gone = set(chosen.values())
    graph = replace(program.graph, outputs=tuple(value for value in program.graph.outputs if value not in gone))
    gradients = tuple(pair for pair in program.gradients if pair[0] not in chosen)
    return replace(program, graph=graph, gradients=gradients, updated=tuple(sorted(chosen)))


def _touched(graph: Graph) -> dict[int, int]:
    """By storage, the last operator that reads a value in it, or makes one."""
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
    """The backward operators that must not run again: their results are needed after the update of a parameter that
    they depend on. Times are pairs: an operator, and the parameter that is updated after it."""
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
    """By storage, the parameters (as bits) that are read when its content is computed again."""
    reaching = dict(bits)
    for op in graph.ops:
        if op.id not in once:
            _reach(graph, op, _of_inputs(graph, op, reaching), reaching)
    return reaching


def _reach(graph: Graph, op: Op, mask: int, reaching: dict[int, int]) -> None:
    """Record that computing ``op`` again reads the parameters in ``mask``; so does computing its results again, except
    those that the caller keeps alive."""
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
    """The update of a parameter whose state is fetched and stored. The state is one storage with a value before and
    after the update."""
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
