"""JSON forms, versioned: ``lowtide-graph/1`` (a graph with its costs), ``lowtide-schedule/1``, and the published
``lowtide-dag/1``, which loads into a graph where every op returns one value in a storage of its own."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from lowtide.errors import PlanError
from lowtide.ir.costs import Column, Costs
from lowtide.ir.graph import Graph, Op, Phase, Storage, Value
from lowtide.ir.schedule import Compute, Free, RestoreRng, SaveRng, Schedule, Step

GRAPH_FORMAT = "lowtide-graph/1"
SCHEDULE_FORMAT = "lowtide-schedule/1"
DAG_FORMAT = "lowtide-dag/1"
_STEPS: dict[str, type[Compute] | type[Free] | type[SaveRng] | type[RestoreRng]] = {
    "compute": Compute,
    "free": Free,
    "save_rng": SaveRng,
    "restore_rng": RestoreRng,
}
_FLAGS = ("random", "effect", "collective")


def graph_to_json(graph: Graph, costs: Costs) -> dict[str, Any]:
    """A ``lowtide-graph/1`` object."""
    return {
        "format": GRAPH_FORMAT,
        "name": graph.name,
        "fixed_bytes": graph.fixed_bytes,
        "forward_ops": graph.forward_ops,
        "device": costs.device,
        "rng_state_bytes": costs.rng_state_bytes,
        "inputs": list(graph.inputs),
        "forward_outputs": list(graph.forward_outputs),
        "outputs": list(graph.outputs),
        "storages": [
            {"base": storage.base, "bytes": int(costs.storage_bytes[storage.id])} for storage in graph.storages
        ],
        "values": [
            {"name": v.name, "storage": v.storage, "producer": v.producer, "dtype": v.dtype, "shape": list(v.shape)}
            for v in graph.values
        ],
        "ops": [_op_to_json(op, costs) for op in graph.ops],
    }


def _op_to_json(op: Op, costs: Costs) -> dict[str, Any]:
    return {
        "name": op.name,
        "target": op.target,
        "inputs": list(op.inputs),
        "outputs": list(op.outputs),
        "time_ns": int(costs.time_ns[op.id]),
        "workspace_bytes": int(costs.workspace_bytes[op.id]),
        "flags": [flag for flag in _FLAGS if getattr(op, flag)],
        "module": op.module,
        "source": op.source,
    }


def graph_from_json(data: dict[str, Any]) -> tuple[Graph, Costs]:
    """Inverse of ``graph_to_json``. Raises ``PlanError`` naming what is wrong."""
    _expect_format(data, GRAPH_FORMAT)
    try:
        graph = _graph(data)
        costs = Costs(
            _column(_count(op["time_ns"], op["name"]) for op in data["ops"]),
            _column(_count(op["workspace_bytes"], op["name"]) for op in data["ops"]),
            _column(_count(storage["bytes"], "a storage") for storage in data["storages"]),
            _count(data["rng_state_bytes"], "rng_state_bytes"),
            data["device"],
        )
    except KeyError as error:
        raise PlanError(f"the graph lacks the key {error}; it is not a complete {GRAPH_FORMAT} object.") from error
    except (TypeError, AttributeError, IndexError) as error:
        raise PlanError(f"the graph is malformed: {error}.") from error
    _validate(graph)
    return graph, costs


def _graph(data: dict[str, Any]) -> Graph:
    values = tuple(
        Value(i, v["name"], v["storage"], v["producer"], v["dtype"], tuple(v["shape"]))
        for i, v in enumerate(data["values"])
    )
    members: list[list[int]] = [[] for _ in data["storages"]]
    for value in values:
        members[_index(value.storage, len(members), f"value {value.name}")].append(value.id)
    forward_ops = _count(data["forward_ops"], "forward_ops")
    return Graph(
        name=data["name"],
        ops=tuple(
            Op(
                i,
                op["name"],
                op["target"],
                tuple(op["inputs"]),
                tuple(op["outputs"]),
                Phase.FORWARD if i < forward_ops else Phase.BACKWARD,
                **{flag: flag in op["flags"] for flag in _FLAGS},
                module=op["module"],
                source=op["source"],
            )
            for i, op in enumerate(data["ops"])
        ),
        values=values,
        storages=tuple(Storage(i, s["base"], tuple(members[i])) for i, s in enumerate(data["storages"])),
        inputs=tuple(data["inputs"]),
        forward_outputs=tuple(data["forward_outputs"]),
        outputs=tuple(data["outputs"]),
        forward_ops=forward_ops,
        fixed_bytes=_count(data["fixed_bytes"], "fixed_bytes"),
    )


def _validate(graph: Graph) -> None:
    available = {value.id for value in graph.values if value.producer is None}
    for op in graph.ops:
        for value in op.inputs:
            _index(value, len(graph.values), f"op {op.name}")
            if value not in available:
                raise PlanError(f"op {op.name} reads {graph.values[value].name}, which no earlier op returns.")
        for value in op.outputs:
            if graph.values[_index(value, len(graph.values), f"op {op.name}")].producer != op.id:
                raise PlanError(f"op {op.name} returns value {value}, which names another producer.")
        available.update(op.outputs)
    for value in (*graph.inputs, *graph.forward_outputs, *graph.outputs):
        if _index(value, len(graph.values), "the graph's inputs and outputs") not in available:
            raise PlanError(f"value {graph.values[value].name} is never produced.")
    for storage in graph.storages:
        if storage.base is not None:
            _index(storage.base, len(graph.ops), f"storage {storage.id}")


def dag_from_json(data: dict[str, Any]) -> tuple[Graph, Costs]:
    """Load a ``lowtide-dag/1`` object. Raises ``PlanError`` naming the op that is wrong."""
    _expect_format(data, DAG_FORMAT)
    try:
        ops, forward_ops = data["ops"], _count(data["forward_ops"], "forward_ops")
        names = [str(op["name"]) for op in ops]
        for index, op in enumerate(ops):
            for source in op["inputs"]:
                if not isinstance(source, int) or not 0 <= source < index:
                    raise PlanError(f"op {names[index]} ({index}) reads op {source}, which is not an earlier one.")
        read = {source for op in ops for source in op["inputs"]} | set(data["outputs"])
        graph = Graph(
            name=str(data.get("name", "")),
            ops=tuple(
                Op(
                    i,
                    names[i],
                    names[i],
                    tuple(op["inputs"]),
                    (i,),
                    Phase.FORWARD if i < forward_ops else Phase.BACKWARD,
                    effect=i not in read,  # every op runs, also one whose result nobody reads
                )
                for i, op in enumerate(ops)
            ),
            values=tuple(Value(i, name, i, i) for i, name in enumerate(names)),
            storages=tuple(Storage(i, i, (i,)) for i in range(len(ops))),
            inputs=(),
            forward_outputs=(),
            outputs=tuple(_index(value, len(ops), "outputs") for value in data["outputs"]),
            forward_ops=forward_ops,
            fixed_bytes=_count(data.get("fixed_bytes", 0), "fixed_bytes"),
        )
        costs = Costs(
            _column(_count(op["time_ns"], name) for op, name in zip(ops, names, strict=True)),
            _column(_count(op.get("workspace_bytes", 0), name) for op, name in zip(ops, names, strict=True)),
            _column(_count(op["bytes"], name) for op, name in zip(ops, names, strict=True)),
        )
    except KeyError as error:
        raise PlanError(f"the graph lacks the key {error}; it is not a complete {DAG_FORMAT} object.") from error
    except (TypeError, AttributeError) as error:
        raise PlanError(f"the graph is malformed: {error}.") from error
    if not graph.ops:
        raise PlanError("the graph has no ops.")
    return graph, costs


def schedule_to_json(schedule: Schedule) -> dict[str, Any]:
    """A ``lowtide-schedule/1`` object: steps as ``[kind, id]``, and the index of the first backward step."""
    names = {kind: name for name, kind in _STEPS.items()}
    steps = [[names[type(s)], s.storage if isinstance(s, Free) else s.op] for s in schedule.steps]
    return {"format": SCHEDULE_FORMAT, "boundary": schedule.boundary, "steps": steps}


def schedule_from_json(data: dict[str, Any]) -> Schedule:
    """Inverse of ``schedule_to_json``."""
    _expect_format(data, SCHEDULE_FORMAT)
    try:
        steps: list[Step] = [_STEPS[kind](int(target)) for kind, target in data["steps"]]
        return Schedule(tuple(steps), int(data["boundary"]))
    except (KeyError, TypeError, ValueError) as error:
        raise PlanError(f"the schedule is malformed: {error}.") from error


def load_instance(path: str | Path) -> tuple[Graph, Costs]:
    """Graph and costs from a file: ``lowtide-dag/1``, ``lowtide-graph/1``, or a saved plan."""
    data = read_json(path)
    if isinstance(data.get("graph"), dict):
        data = data["graph"]
    return dag_from_json(data) if data.get("format") == DAG_FORMAT else graph_from_json(data)


def read_json(path: str | Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ``PlanError`` where there is none."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"cannot read {path}: {error.strerror or error}.") from error
    except ValueError as error:
        raise PlanError(f"{path} is not JSON: {error}.") from error
    if not isinstance(data, dict):
        raise PlanError(f"{path} holds a JSON {type(data).__name__}, not an object.")
    return data


def _expect_format(data: dict[str, Any], wanted: str) -> None:
    found = data.get("format")
    if found != wanted:
        known = ", ".join((DAG_FORMAT, GRAPH_FORMAT))
        raise PlanError(f"expected format {wanted!r}, found {found!r}; graphs are read from {known}.")


def _column(numbers: Iterable[int]) -> Column:
    return np.fromiter(numbers, dtype=np.int64)


def _count(number: Any, what: str) -> int:
    if isinstance(number, bool) or not isinstance(number, (int, float)) or number < 0 or number != int(number):
        raise PlanError(f"{what}: {number!r} is not a whole number of at least 0.")
    return int(number)


def _index(number: Any, count: int, what: str) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < count:
        raise PlanError(f"{what}: {number!r} is not an index below {count}.")
    return number
