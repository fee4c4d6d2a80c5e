"""``lowtide-dag/1``, the published form of a plain DAG with costs: every op returns one value in a storage of its own."""

from __future__ import annotations

from typing import Any

from lowtide.errors import PlanError
from lowtide.ir.costs import Costs
from lowtide.ir.fields import DAG_FORMAT, column, count, expect_format, index
from lowtide.ir.graph import Graph, Op, Phase, Storage, Value


def dag_from_json(data: dict[str, Any]) -> tuple[Graph, Costs]:
    """Load a ``lowtide-dag/1`` object. Raises ``PlanError`` naming the op that is wrong."""
    expect_format(data, DAG_FORMAT)
    try:
        return _graph(data), _costs(data)
    except KeyError as error:
        raise PlanError(f"the graph lacks the key {error}; it is not a complete {DAG_FORMAT} object.") from error
    except (TypeError, AttributeError) as error:
        raise PlanError(f"the graph is malformed: {error}.") from error


def _graph(data: dict[str, Any]) -> Graph:
    names = [str(op["name"]) for op in data["ops"]]
    if not names:
        raise PlanError("the graph has no ops.")
    inputs = [_inputs(op, position) for position, op in enumerate(data["ops"])]
    outputs = tuple(index(value, len(names), "outputs") for value in data["outputs"])
    read = {source for sources in inputs for source in sources} | set(outputs)
    forward_ops = index(data["forward_ops"], len(names) + 1, "forward_ops")
    return Graph(
        name=str(data.get("name", "")),
        ops=tuple(
            Op(
                i,
                name,
                name,
                inputs[i],
                (i,),
                Phase.FORWARD if i < forward_ops else Phase.BACKWARD,
                effect=i not in read,  # every op runs, also one whose result nobody reads
            )
            for i, name in enumerate(names)
        ),
        values=tuple(Value(i, name, i, i) for i, name in enumerate(names)),
        storages=tuple(Storage(i, i, (i,)) for i in range(len(names))),
        inputs=(),
        forward_outputs=(),
        outputs=outputs,
        forward_ops=forward_ops,
        fixed_bytes=count(data.get("fixed_bytes", 0), "fixed_bytes"),
    )


def _inputs(op: dict[str, Any], position: int) -> tuple[int, ...]:
    for source in op["inputs"]:
        if isinstance(source, bool) or not isinstance(source, int) or not 0 <= source < position:
            raise PlanError(f"op {op['name']} ({position}) reads op {source!r}, which is not an earlier one.")
    return tuple(op["inputs"])


def _costs(data: dict[str, Any]) -> Costs:
    ops = data["ops"]
    return Costs(
        column(count(op["time_ns"], op["name"]) for op in ops),
        column(count(op.get("workspace_bytes", 0), op["name"]) for op in ops),
        column(count(op["bytes"], op["name"]) for op in ops),
    )
