"""JSON forms, versioned: ``lowtide-graph/1`` (a graph with its costs) and ``lowtide-schedule/1``; and files of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lowtide.errors import PlanError
from lowtide.ir.costs import Costs
from lowtide.ir.dag import dag_from_json
from lowtide.ir.fields import DAG_FORMAT, GRAPH_FORMAT, SCHEDULE_FORMAT, column, count, expect_format, index, text
from lowtide.ir.graph import Graph, Op, Phase, Storage, Value
from lowtide.ir.schedule import Compute, Free, RestoreRng, SaveRng, Schedule, Step
from lowtide.ir.simulator import owned_storages

_STEPS: dict[str, type[Compute] | type[Free] | type[SaveRng] | type[RestoreRng]] = {
    "compute": Compute,
    "free": Free,
    "save_rng": SaveRng,
    "restore_rng": RestoreRng,
}
_FLAGS = ("random", "effect", "collective")
# What an op or a value may leave out.
_OP_DEFAULTS: dict[str, Any] = {"workspace_bytes": 0, "flags": [], "overwrites": [], "module": "", "source": ""}
_VALUE_DEFAULTS: dict[str, Any] = {"dtype": "", "shape": []}


def graph_to_json(graph: Graph, costs: Costs, *, compact: bool = False) -> dict[str, Any]:
    """A ``lowtide-graph/1`` object. ``compact``: ops and values leave out what has its default."""
    data = _complete(graph, costs)
    if compact:
        data["ops"] = [_without(op, _OP_DEFAULTS) for op in data["ops"]]
        data["values"] = [_without(value, _VALUE_DEFAULTS) for value in data["values"]]
    return data


def _without(fields: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    return {key: field for key, field in fields.items() if key not in defaults or field != defaults[key]}


def _complete(graph: Graph, costs: Costs) -> dict[str, Any]:
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
        "overwrites": list(op.overwrites),
        "module": op.module,
        "source": op.source,
    }


def graph_from_json(data: dict[str, Any]) -> tuple[Graph, Costs]:
    """Inverse of ``graph_to_json``. Raises ``PlanError`` naming what is wrong."""
    expect_format(data, GRAPH_FORMAT)
    try:
        data = {
            **data,
            "ops": [{**_OP_DEFAULTS, **op} for op in data["ops"]],
            "values": [{**_VALUE_DEFAULTS, **value} for value in data["values"]],
        }
        graph = _graph(data)
        costs = Costs(
            column(count(op["time_ns"], op["name"]) for op in data["ops"]),
            column(count(op["workspace_bytes"], op["name"]) for op in data["ops"]),
            column(count(storage["bytes"], "a storage") for storage in data["storages"]),
            count(data["rng_state_bytes"], "rng_state_bytes"),
            text(data["device"], "device"),
        )
    except KeyError as error:
        raise PlanError(f"the graph lacks the key {error}; it is not a complete {GRAPH_FORMAT} object.") from error
    except (TypeError, AttributeError, ValueError) as error:
        raise PlanError(f"the graph is malformed: {error}.") from error
    _validate(graph)
    _validate_overwrites(graph, costs)
    return graph, costs


def _graph(data: dict[str, Any]) -> Graph:
    values = tuple(
        Value(
            i,
            text(v["name"], "name of a value"),
            v["storage"],
            v["producer"],
            text(v["dtype"], f"dtype of value {v['name']}"),
            tuple(count(size, f"shape of value {v['name']}") for size in v["shape"]),
        )
        for i, v in enumerate(data["values"])
    )
    members: list[list[int]] = [[] for _ in data["storages"]]
    for value in values:
        members[index(value.storage, len(members), f"value {value.name}")].append(value.id)
    forward_ops = index(data["forward_ops"], len(data["ops"]) + 1, "forward_ops")
    return Graph(
        name=text(data["name"], "name of the graph"),
        ops=tuple(_op(op, i, forward_ops) for i, op in enumerate(data["ops"])),
        values=values,
        storages=tuple(Storage(i, s["base"], tuple(members[i])) for i, s in enumerate(data["storages"])),
        inputs=tuple(data["inputs"]),
        forward_outputs=tuple(data["forward_outputs"]),
        outputs=tuple(data["outputs"]),
        forward_ops=forward_ops,
        fixed_bytes=count(data["fixed_bytes"], "fixed_bytes"),
    )


def _op(op: dict[str, Any], position: int, forward_ops: int) -> Op:
    name = text(op["name"], f"name of op {position}")
    unknown = [flag for flag in op["flags"] if flag not in _FLAGS]
    if unknown:
        raise PlanError(f"op {name} has unknown flags {unknown}; known are {', '.join(_FLAGS)}.")
    return Op(
        position,
        name,
        text(op["target"], f"target of {name}"),
        tuple(op["inputs"]),
        tuple(op["outputs"]),
        Phase.FORWARD if position < forward_ops else Phase.BACKWARD,
        **{flag: flag in op["flags"] for flag in _FLAGS},
        overwrites=tuple(op["overwrites"]),
        module=text(op["module"], f"module of {name}"),
        source=text(op["source"], f"source of {name}"),
    )


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
    for op, own in zip(graph.ops, owned_storages(graph), strict=True):
        for value in op.overwrites:
            if value not in op.inputs:
                raise PlanError(f"op {op.name} is to overwrite value {value}, which it does not read.")
            size = costs.storage_bytes[graph.values[value].storage]
            if len(own) != 1 or costs.storage_bytes[own[0]] != size:
                raise PlanError(f"op {op.name} may overwrite an input only with one storage of the same size.")


def schedule_to_json(schedule: Schedule) -> dict[str, Any]:
    """A ``lowtide-schedule/1`` object: steps as ``[kind, id]``, and the index of the first backward step."""
    names = {kind: name for name, kind in _STEPS.items()}
    steps = [[names[type(s)], *_numbers(s)] for s in schedule.steps]
    return {"format": SCHEDULE_FORMAT, "boundary": schedule.boundary, "steps": steps}


def _numbers(step: Step) -> list[int]:
    if isinstance(step, Compute) and step.into is not None:
        return [step.op, step.into]
    return [step.storage if isinstance(step, Free) else step.op]


def schedule_from_json(data: dict[str, Any]) -> Schedule:
    """Inverse of ``schedule_to_json``."""
    expect_format(data, SCHEDULE_FORMAT)
    try:
        steps: list[Step] = [
            _STEPS[kind](*(count(number, f"{kind} step") for number in (target, *into)))
            for kind, target, *into in data["steps"]
        ]
        return Schedule(tuple(steps), count(data["boundary"], "boundary"))
    except (KeyError, TypeError, ValueError) as error:
        raise PlanError(f"the schedule is malformed: {error}.") from error


def load_instance(path: str | Path) -> tuple[Graph, Costs]:
    """Graph and costs from a file: ``lowtide-dag/1``, ``lowtide-graph/1``, or a saved plan."""
    data = read_json(path)
    if isinstance(data.get("graph"), dict):
        data = data["graph"]
    expect_format(data, DAG_FORMAT, GRAPH_FORMAT)
    return dag_from_json(data) if data["format"] == DAG_FORMAT else graph_from_json(data)


def read_json(path: str | Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ``PlanError`` where there is none."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"cannot read {path}: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{path} is not JSON: {error}.") from error
    if not isinstance(data, dict):
        raise PlanError(f"{path} holds a JSON {type(data).__name__}, not an object.")
    return data
