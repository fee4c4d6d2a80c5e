"""Read and write graphs and schedules as versioned JSON: ``lowtide-graph/1`` (a graph with its costs), ``lowtide-dag/1`` (the
published form for plain DAGs: every op returns one value in a storage of its own) and ``lowtide-schedule/1``. With a second
memory, transfers, collectives that overlap with computation or collectives that may be recomputed, the version is 2."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lowtide.errors import PlanError
from lowtide.ir.costs import Column, Costs, SecondMemory
from lowtide.ir.fields import (
    DAG_FORMAT,
    GRAPH_FORMAT,
    SCHEDULE_FORMAT,
    SECOND,
    count,
    expect_format,
    format_of,
    index,
    shown,
    text,
    truth,
)
from lowtide.ir.graph import Graph, Op, Phase, Storage, Value
from lowtide.ir.schedule import Compute, Fetch, Free, Offload, RestoreRng, SaveRng, Schedule, Step

STEPS: dict[str, Callable[..., Step]] = {
    "compute": Compute,
    "free": Free,
    "save_rng": SaveRng,
    "restore_rng": RestoreRng,
    "offload": Offload,
    "fetch": Fetch,
}
ON_STORAGES = ("free", "offload", "fetch")
_STEP_NAMES = {kind: name for name, kind in STEPS.items()}
FLAGS = ("random", "effect", "collective", "once")
_MOST = 1 << 60  # of all bytes together, and of all nanoseconds: 36 years
LISTS = ("inputs", "forward_outputs", "outputs")
# Fields that an op or a value may leave out, with their defaults.
_OP_DEFAULTS: dict[str, Any] = {"workspace_bytes": 0, "flags": [], "overwrites": [], "module": "", "source": ""}
_VALUE_DEFAULTS: dict[str, Any] = {"dtype": "", "shape": []}


def graph_to_json(graph: Graph, costs: Costs, *, compact: bool = False) -> dict[str, Any]:
    """Return a ``lowtide-graph`` object. ``compact``: leave out fields of ops and values that have their defaults."""
    storages = zip(graph.storages, costs.storage_bytes.tolist(), strict=True)
    ops = zip(graph.ops, costs.time_ns.tolist(), costs.workspace_bytes.tolist(), strict=True)
    data = {
        "format": format_of(GRAPH_FORMAT, _needs_second(graph, costs)),
        **_fields(graph, "name", "fixed_bytes", "forward_ops"),
        **_fields(costs, "device", "rng_state_bytes"),
        **_fields(graph, *LISTS),
        "storages": [{"base": storage.base, "bytes": size} for storage, size in storages],
        "values": [_fields(value, "name", "storage", "producer", "dtype", "shape") for value in graph.values],
        "ops": [
            _fields(op, "name", "target", "inputs", "outputs")
            | {"time_ns": time, "workspace_bytes": workspace, "flags": [flag for flag in FLAGS if getattr(op, flag)]}
            | _fields(op, "overwrites", "module", "source")
            for op, time, workspace in ops
        ],
    }
    if costs.collectives_beside:
        data["collectives_beside"] = True
    if costs.second_memory is not None:
        data["second_memory"] = dataclasses.asdict(costs.second_memory)
    if compact:
        for kind, defaults in (("ops", _OP_DEFAULTS), ("values", _VALUE_DEFAULTS)):
            data[kind] = [
                {key: field for key, field in entry.items() if key not in defaults or field != defaults[key]}
                for entry in data[kind]
            ]
    return data


def _needs_second(graph: Graph, costs: Costs) -> bool:
    """Whether the graph needs version 2 of the format."""
    beside = costs.second_memory is not None or costs.collectives_beside
    return beside or any(op.collective and op.recomputable for op in graph.ops)


def _fields(record: Any, *names: str) -> dict[str, Any]:
    fields = {name: getattr(record, name) for name in names}
    return {name: list(field) if isinstance(field, tuple) else field for name, field in fields.items()}


def graph_from_json(data: dict[str, Any]) -> tuple[Graph, Costs]:
    """Inverse of ``graph_to_json``. Raises ``PlanError`` naming the field, op or value that is wrong."""
    expect_format(data, GRAPH_FORMAT)
    with _naming_what_is_wrong(GRAPH_FORMAT):
        ops = [{**_OP_DEFAULTS, **op} for op in data["ops"]]
        values = [{**_VALUE_DEFAULTS, **value} for value in data["values"]]
        if data["format"] == GRAPH_FORMAT:
            ops = [op | {"flags": _flags_of_first(op["flags"])} for op in ops]
        graph = _graph(data, ops, values)
        costs = Costs(
            _column((op["time_ns"], op["name"]) for op in ops),
            _column((op["workspace_bytes"], op["name"]) for op in ops),
            _column((storage["bytes"], "a storage") for storage in data["storages"]),
            count(data["rng_state_bytes"], "rng_state_bytes"),
            text(data["device"], "device"),
            second_memory_from_json(data.get("second_memory")),
            truth(data.get("collectives_beside", False), "collectives_beside"),
        )
    _validate(graph)
    _validate_overwrites(graph, costs)
    _validate_totals(graph, costs)
    return graph, costs


def _flags_of_first(flags: list[str]) -> list[str]:
    """Translate an op's flags from version 1, in which collectives are never recomputed: they get ``once``."""
    return [*flags, "once"] if "collective" in flags and not {"effect", "once"}.intersection(flags) else flags


def second_memory_from_json(data: Any) -> SecondMemory | None:
    """Read the second memory of a graph: bandwidths are required, other fields have defaults. ``None`` for ``None``."""
    if data is None:
        return None
    known = {field.name for field in dataclasses.fields(SecondMemory)}
    if not isinstance(data, dict) or not set(data) <= known:
        raise PlanError(f"a second memory has the fields {', '.join(sorted(known))}, not {shown(data)}.")
    shared, name = data.get("shared", False), text(data.get("name", ""), "name of the second memory")
    fields = {key: number for key, number in data.items() if key not in ("shared", "name")}
    for required in ("offload_bytes_per_second", "fetch_bytes_per_second"):
        if required not in fields:
            raise PlanError(f"the second memory lacks {required}.")
    truth(shared, "shared of the second memory")
    if fields.get("capacity_bytes") is None:
        fields.pop("capacity_bytes", None)
    return SecondMemory(**{key: count(number, key) for key, number in fields.items()}, shared=shared, name=name)


def dag_from_json(data: dict[str, Any]) -> tuple[Graph, Costs]:
    """Return graph and costs of a ``lowtide-dag`` object. Raises ``PlanError`` naming the op that is wrong."""
    with _naming_what_is_wrong(DAG_FORMAT):
        form = _graph_of_dag(data)
    return graph_from_json(form)


def _graph_of_dag(data: dict[str, Any]) -> dict[str, Any]:
    expect_format(data, DAG_FORMAT)
    ops = [{"workspace_bytes": 0, **op, "name": str(op["name"])} for op in data["ops"]]
    if not ops:
        raise PlanError("the graph has no ops.")
    for position, op in enumerate(ops):
        for source in op["inputs"]:
            if isinstance(source, bool) or not isinstance(source, int) or not 0 <= source < position:
                raise PlanError(f"op {op['name']} ({position}) reads op {shown(source)}, which is not an earlier one.")
    outputs = [index(output, len(ops), "outputs") for output in data["outputs"]]
    read = {source for op in ops for source in op["inputs"]}.union(outputs)

    def flags(op: dict[str, Any]) -> list[str]:
        return [] if data["format"] == DAG_FORMAT else op.get("flags", [])

    return {
        "format": SECOND[GRAPH_FORMAT],
        "second_memory": data.get("second_memory"),
        "collectives_beside": data.get("collectives_beside", False),
        "name": str(data.get("name", "")),
        "fixed_bytes": data.get("fixed_bytes", 0),
        "forward_ops": data["forward_ops"],
        "device": "",
        "rng_state_bytes": 0,
        "inputs": [],
        "forward_outputs": [],
        "outputs": outputs,
        "ops": [
            {key: op[key] for key in ("name", "inputs", "time_ns", "workspace_bytes")}
            # An op whose result nobody reads is an effect, so that it runs too.
            | {"target": op["name"], "outputs": [i], "flags": flags(op) if i in read else [*flags(op), "effect"]}
            for i, op in enumerate(ops)
        ],
        "storages": [{"base": i, "bytes": count(op["bytes"], op["name"])} for i, op in enumerate(ops)],
        "values": [{"name": op["name"], "storage": i, "producer": i} for i, op in enumerate(ops)],
    }


@contextlib.contextmanager
def _naming_what_is_wrong(form: str) -> Iterator[None]:
    """Turn errors from reading a malformed ``form`` object (missing keys, wrong types) into ``PlanError``."""
    try:
        yield
    except KeyError as error:
        raise PlanError(f"the graph lacks the key {error}; it is not a complete {form} object.") from error
    except (TypeError, AttributeError, ValueError) as error:
        raise PlanError(f"the graph is malformed: {error}.") from error


def _column(numbers: Iterable[tuple[Any, str]]) -> Column:
    return np.array([count(number, what) for number, what in numbers], np.int64)


def _graph(data: dict[str, Any], ops: list[dict[str, Any]], values: list[dict[str, Any]]) -> Graph:
    members: list[list[int]] = [[] for _ in data["storages"]]
    for position, value in enumerate(values):
        members[index(value["storage"], len(members), f"value {value['name']}")].append(position)
    forward_ops = index(data["forward_ops"], len(ops) + 1, "forward_ops")
    lists = {key: tuple(data[key]) for key in LISTS}
    return Graph(
        name=text(data["name"], "name of the graph"),
        ops=tuple(_op(op, position, forward_ops) for position, op in enumerate(ops)),
        values=tuple(_value(value, position) for position, value in enumerate(values)),
        storages=tuple(Storage(i, s["base"], tuple(members[i])) for i, s in enumerate(data["storages"])),
        forward_ops=forward_ops,
        fixed_bytes=count(data["fixed_bytes"], "fixed_bytes"),
        **lists,
    )


def _value(value: dict[str, Any], position: int) -> Value:
    name, dtype = (text(value[key], f"{key} of value {position}") for key in ("name", "dtype"))
    shape = tuple(count(size, f"shape of value {name}") for size in value["shape"])
    producer = value["producer"]
    if producer is not None and type(producer) is not int:
        raise PlanError(f"producer of value {name}: {shown(producer)} is not the number of an op.")
    return Value(position, name, value["storage"], producer, dtype, shape)


def _op(op: dict[str, Any], position: int, forward_ops: int) -> Op:
    fields: dict[str, Any] = {}
    for key in ("name", "target", "module", "source"):
        fields[key] = text(op[key], f"{key} of op {position}")
    for key in ("inputs", "outputs", "overwrites"):
        fields[key] = tuple(op[key])
    unknown = [flag for flag in op["flags"] if flag not in FLAGS]
    if unknown:
        raise PlanError(f"op {op['name']} has unknown flags {shown(unknown)}; known are {', '.join(FLAGS)}.")
    fields |= {flag: flag in op["flags"] for flag in FLAGS}
    return Op(id=position, phase=Phase.FORWARD if position < forward_ops else Phase.BACKWARD, **fields)


def _validate(graph: Graph) -> None:
    available = {value.id for value in graph.values if value.producer is None}
    for op in graph.ops:
        for value in op.inputs:
            index(value, len(graph.values), f"op {op.name}")
            if value not in available:
                raise PlanError(f"op {op.name} reads {graph.values[value].name}, which no earlier op returns.")
        for value in op.outputs:
            if graph.values[index(value, len(graph.values), f"op {op.name}")].producer != op.id:
                raise PlanError(f"op {op.name} returns value {value}, which names another producer.")
        available.update(op.outputs)
    for value in (*graph.inputs, *graph.forward_outputs, *graph.outputs):
        if index(value, len(graph.values), "the graph's inputs and outputs") not in available:
            raise PlanError(f"value {graph.values[value].name} is never produced.")
    for value in graph.forward_outputs:
        made = graph.values[value]
        if made.producer is not None and made.producer >= graph.forward_ops:
            raise PlanError(f"forward output {made.name} is of an op of the backward pass.")
    for unmade in graph.values:
        if unmade.id not in available:
            raise PlanError(f"value {unmade.name} names producer {unmade.producer}, which does not return it.")
    for storage in graph.storages:
        _validate_storage(graph, storage)


def _validate_storage(graph: Graph, storage: Storage) -> None:
    producers = {graph.values[value].producer for value in storage.values}
    if storage.base is None:
        return
    base = graph.ops[index(storage.base, len(graph.ops), f"base of storage {storage.id}")]
    if base.id not in producers:
        raise PlanError(f"op {base.name} allocates storage {storage.id}, but returns no value in it.")
    if any(producer is None or producer < base.id for producer in producers):
        raise PlanError(f"storage {storage.id} has values that are older than {base.name}, which allocates it.")


def _validate_overwrites(graph: Graph, costs: Costs) -> None:
    for op, own in zip(graph.ops, graph.owned, strict=True):
        for value in op.overwrites:
            if index(value, len(graph.values), f"op {op.name}") not in op.inputs:
                raise PlanError(f"op {op.name} is to overwrite value {value}, which it does not read.")
            size = costs.storage_bytes[graph.values[value].storage]
            if len(own) != 1 or costs.storage_bytes[own[0]] != size:
                raise PlanError(f"op {op.name} may overwrite an input only with one storage of the same size.")


def _validate_totals(graph: Graph, costs: Costs) -> None:
    """Refuse totals so large that sums formed by searches could exceed 64 bits."""
    taken = sum(costs.storage_bytes.tolist()) + sum(costs.workspace_bytes.tolist()) + graph.fixed_bytes
    for total, what in ((taken, "bytes"), (sum(costs.time_ns.tolist()), "nanoseconds")):
        if total > _MOST:
            raise PlanError(f"the graph has {total} {what} together, more than {_MOST}.")


def schedule_to_json(schedule: Schedule) -> dict[str, Any]:
    """Return a ``lowtide-schedule`` object: steps as ``[kind, id]``, and the index of the first backward step."""
    steps = [step_to_json(step) for step in schedule.steps]
    return {"format": format_of(SCHEDULE_FORMAT, schedule.moves), "boundary": schedule.boundary, "steps": steps}


def step_to_json(step: Step) -> list[Any]:
    """Return ``[kind, id]``, or ``["compute", op, storage]`` for an op that writes over a storage."""
    numbers = (getattr(step, field.name) for field in dataclasses.fields(step))
    return [_STEP_NAMES[type(step)], *(number for number in numbers if number is not None)]


def schedule_from_json(data: dict[str, Any]) -> Schedule:
    """Inverse of ``schedule_to_json``."""
    expect_format(data, SCHEDULE_FORMAT)
    try:
        steps: list[Step] = [
            STEPS[kind](*(count(number, f"{kind} step") for number in (target, *into)))
            for kind, target, *into in data["steps"]
        ]
        return Schedule(tuple(steps), count(data["boundary"], "boundary"))
    except (KeyError, TypeError, ValueError) as error:
        raise PlanError(f"the schedule is malformed: {error}.") from error


def load_instance(path: str | Path) -> tuple[Graph, Costs]:
    """Read graph and costs from a file: ``lowtide-dag``, ``lowtide-graph``, or a saved plan. Errors name the file."""
    data = read_json(path)
    if isinstance(data.get("graph"), dict):
        data = data["graph"]
    try:
        expect_format(data, DAG_FORMAT, GRAPH_FORMAT)
        return graph_from_json(data) if "storages" in data else dag_from_json(data)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error


def read_json(path: str | Path) -> dict[str, Any]:
    """Read the JSON object in a file. Raises ``PlanError`` if the file cannot be read or holds no object."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise PlanError(f"cannot read {path}: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{path} is not JSON: {error}.") from error
    if not isinstance(data, dict):
        raise PlanError(f"{path} holds a JSON {type(data).__name__}, not an object.")
    return data
