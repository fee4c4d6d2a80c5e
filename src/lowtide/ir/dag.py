"""``lowtide-dag/1``, the published form of a plain DAG with costs: every op returns one value in a storage of its own."""

from __future__ import annotations

from typing import Any

from lowtide.errors import PlanError
from lowtide.ir.fields import DAG_FORMAT, GRAPH_FORMAT, count, expect_format, index


def graph_of_dag(data: dict[str, Any]) -> dict[str, Any]:
    """The ``lowtide-graph/1`` object of a ``lowtide-dag/1`` object. Raises ``PlanError`` naming the op that is wrong."""
    expect_format(data, DAG_FORMAT)
    ops = [{"workspace_bytes": 0, **op, "name": str(op["name"])} for op in data["ops"]]
    if not ops:
        raise PlanError("the graph has no ops.")
    for position, op in enumerate(ops):
        for source in op["inputs"]:
            if isinstance(source, bool) or not isinstance(source, int) or not 0 <= source < position:
                raise PlanError(f"op {op['name']} ({position}) reads op {source!r}, which is not an earlier one.")
    outputs = [index(output, len(ops), "outputs") for output in data["outputs"]]
    read = {source for op in ops for source in op["inputs"]}.union(outputs)
    return {
        "format": GRAPH_FORMAT,
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
            # Every op runs, also one whose result nobody reads.
            | {"target": op["name"], "outputs": [i], "flags": [] if i in read else ["effect"]}
            for i, op in enumerate(ops)
        ],
        "storages": [{"base": i, "bytes": count(op["bytes"], op["name"])} for i, op in enumerate(ops)],
        "values": [{"name": op["name"], "storage": i, "producer": i} for i, op in enumerate(ops)],
    }
