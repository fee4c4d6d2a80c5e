"""Operators that no plan can hold, with what to do instead. To refuse one more, add a line to ``REFUSED``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from lowtide.capture.convert.sparse import is_known, is_made_sparse
from lowtide.errors import CaptureError

# By name ("aten::unique", or one overload, "aten::unique.dim"): why, and the nearest fix. None so far: those that are refused
# are so for what they return.
REFUSED: dict[str, str] = {}


def refuse(node: fx.Node, origin: Callable[[fx.Node], tuple[str, str]]) -> None:
    """Raise ``CaptureError`` if a node of the joint graph cannot be planned. ``origin``: its module path and line."""
    reason = _reason(node)
    if reason:
        module, source = origin(node)
        place = "".join((f" in module {module!r}" if module else "", f" at {source}" if source else ""))
        raise CaptureError(
            f"operator {node.target}{place} {reason}, or run the model under lowtide.online.", source=source
        )


def _reason(node: fx.Node) -> str:
    if isinstance(node.target, torch._ops.OpOverload):
        name = node.target._schema.name
        known = REFUSED.get(f"{name}.{node.target._overloadname}") or REFUSED.get(name)
        if known:
            return known
    if not is_known(node):
        return "reads or makes a sparse tensor, which a plan can only multiply, transpose and sum. Compute densely"
    value = node.meta.get("val")
    for tensor in value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(tensor, torch.Tensor) and tensor.layout is not torch.strided and not _is_read(node):
            return f"makes a sparse tensor ({tensor.layout}), which a plan cannot hold. Compute densely (sparse=False)"
    return ""


def _is_read(node: fx.Node) -> bool:
    """Whether the node is sparse, and only a part of the operators that read it."""
    return is_made_sparse(node) and all(user.op == "call_function" for user in node.users)
