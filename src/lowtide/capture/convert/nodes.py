"""Questions about the nodes of a joint graph."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable, Sequence, Set
from typing import Any

import torch
from torch import fx

from lowtide.capture.trace.fake import UNINITIALISED
from lowtide.capture.trace.sizes import SYMBOLIC
from lowtide.program.roles import Tangent
from lowtide.program.running_statistics import NAMESPACE as STATISTICS

_ATEN = torch.ops.aten
# Whose last results they are.
ALIASES = {_ATEN.detach.default, _ATEN.alias.default, _ATEN.lift_fresh.default, _ATEN.alias_copy.default}
_TRAINING_NORMS = {"aten::_native_batch_norm_legit_functional", "aten::_batch_norm_with_update_functional"}
_STATISTICS = slice(3, 5)  # among their arguments, and those of their backward
_NORMS_BACKWARD = tuple(f"aten.{one}batch_norm_backward." for one in ("native_", "", "cudnn_", "miopen_"))


def is_whole(node: fx.Node) -> bool:
    """Whether a node is ``tensor[:]`` of a tensor with symbolic sizes, or its backward. For sizes that are numbers, it
    is not recorded at all."""
    first = {_ATEN.slice.Tensor: 2, _ATEN.slice_backward.default: 3}.get(node.target)  # type: ignore[call-overload]
    if first is None or node.args[first : first + 2] != (0, sys.maxsize) or node.args[first + 2 :] not in ((), (1,)):
        return False
    source: Any = node.args[0]
    return any(isinstance(size, SYMBOLIC) for size in (*source.meta["val"].shape, *node.meta["val"].shape))


def is_size(node: fx.Node) -> bool:
    """Whether a node computes a symbolic number, not a tensor."""
    return isinstance(node.meta.get("val"), SYMBOLIC)


def fills_empty(node: fx.Node) -> bool:
    """Whether a node is the functional form of ``empty_like(x).bernoulli_(p)``, as dropout has it."""
    if node.target is not _ATEN.bernoulli.p:
        return False
    source = getattr(node.args[0], "target", None)
    return isinstance(source, torch._ops.OpOverload) and source._schema.name.split("::")[1] in UNINITIALISED


def owned_layout(fake: torch.Tensor) -> tuple[Any, ...]:
    return (tuple(fake.shape), tuple(fake.stride()), fake.dtype, fake.device)


def is_backward(node: fx.Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_backward"


def begins_backward(node: fx.Node) -> bool:
    """Whether the node begins the backward of an autograd function that Dynamo traced, which has no tag."""
    return is_backward(node) or any(map(is_tangent, node.all_input_nodes))


def is_tangent(node: Any) -> bool:
    """Whether the node is an arriving gradient: the gradient itself, where the tracer has recorded its conjugate."""
    if not isinstance(node, fx.Node):
        return False
    if node.target is _ATEN._conj.default:
        source: Any = node.args[0]  # may be a number too
        return is_tangent(source) and source.op == "placeholder" and source.meta["val"].is_conj()
    return isinstance(node.meta.get("role"), Tangent)


def ancestors(outputs: Iterable[Any]) -> set[fx.Node]:
    """The nodes from which ``outputs`` are computed, including these; without nodes that only give a size."""
    pending = [node for node in outputs if isinstance(node, fx.Node)]
    found: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending.extend([] if fills_empty(node) or is_size(node) else node.all_input_nodes)
    return found


def reaching(forward: Sequence[fx.Node], backward: Set[fx.Node], results: Set[fx.Node] = frozenset()) -> set[fx.Node]:
    """The forward nodes whose data reaches the backward pass or one of these ``results``."""
    found: set[fx.Node] = set()
    for node in reversed(forward):
        if node in results or any(user in found or user in backward for user in node.users):
            found.add(node)
    return found


def is_training_norm(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and (schema.name in _TRAINING_NORMS or schema.name.startswith(f"{STATISTICS}::"))


def depends_on(given: fx.Node, reaches: Set[fx.Node]) -> bool:
    """Whether anything in ``reaches`` is computed from the values of ``given``. Norms write new running statistics and
    hand them to their backward pass, but compute with neither."""
    readers = [user for user in given.users if user in reaches]
    norms = [user for user in readers if is_training_norm(user) or str(user.target).startswith(_NORMS_BACKWARD)]
    if any(user not in norms or given not in user.args[_STATISTICS] or given in user.args[:3] for user in readers):
        return True
    return any(depends_on(each, reaches) for user in norms for each in _running_statistics(user))


def _running_statistics(norm: fx.Node) -> list[fx.Node]:
    """The running statistics that a norm returns: its last two results."""
    if not is_training_norm(norm):
        return []
    first: int = len(norm.target._schema.returns) - 2  # type: ignore[union-attr]
    return [user for user in norm.users if user.args[1] >= first]  # type: ignore[operator]


def is_running_statistic(node: fx.Node) -> bool:
    """Whether the node is a running statistic that a norm returns. Eager writes it without counting a new version."""
    return node.target is operator.getitem and is_training_norm(node.args[0])  # type: ignore[arg-type]
