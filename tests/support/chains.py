"""A small training program for tests of plans and the command line: a chain of layers, forward and backward."""

from __future__ import annotations

from typing import Any

LAYER_BYTES = 1000


def chain_dag(layers: int = 6) -> dict[str, Any]:
    """``lowtide-dag/1``: ``layers`` forward ops, and backward ops that each read a forward result and the last gradient."""
    forward = [_op(f"layer{i}", 10 * (i + 1), [i - 1] if i else []) for i in range(layers)]
    backward = [_op("gradient0", 20, [layers - 1])]
    for i in range(1, layers):
        backward.append(_op(f"gradient{i}", 20, [layers + i - 1, layers - 1 - i]))
    return {
        "format": "lowtide-dag/1",
        "name": "chain",
        "fixed_bytes": 0,
        "ops": [*forward, *backward],
        "forward_ops": layers,
        "outputs": [2 * layers - 1],
    }


def _op(name: str, time_ns: int, inputs: list[int]) -> dict[str, Any]:
    return {"name": name, "time_ns": time_ns, "bytes": LAYER_BYTES, "workspace_bytes": 0, "inputs": inputs}
