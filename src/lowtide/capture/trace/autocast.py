"""Autocast's cache of casts: a parameter that is used twice is cast once, and its gradients are summed in the low
precision.

The tracer switches this cache off. The cache would not work either, since it keeps casts of leaves only, and traced
parameters are no leaves. So the forward pass is traced with one cast per use, and ``periods_of_casts`` marks them.
Afterwards, ``share_casts`` merges those that are one in eager: the first cast serves all uses, the gradients of the
uses are summed in low precision, and the sum is cast. As in eager, casts are kept until the outermost autocast ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from lowtide.capture.trace.patches import wrapped
from lowtide.capture.trace.recorder import added
from lowtide.device import plain_types
from lowtide.program.layouts import memory_of
from lowtide.program.roles import Gradient

_ATEN = torch.ops.aten
_TO_COPY = _ATEN._to_copy.default
_ADD = _ATEN.add.Tensor
# The user's own casts are not kept.
_EXPLICIT = {
    torch.Tensor.to,
    torch.Tensor.type,
    torch.Tensor.type_as,
    torch.Tensor.half,
    torch.Tensor.bfloat16,
    torch.Tensor.copy_,
}

Period = Callable[[Any, Any, Any], str]
Group = tuple[fx.Node, torch.dtype, str]


@contextlib.contextmanager
def periods_of_casts(enabled: bool) -> Iterator[Period]:
    """Inside, the yielded function maps a torch function and its arguments to a text: in which period its casts are
    kept, and of which types they are. The texts of two casts of one parameter are equal if the casts are one in
    eager. The text is empty if nothing is kept. ``enabled``: whether the cache is on at the beginning."""
    periods, types = 0, plain_types()

    def counting(clear: Callable[[], None]) -> Callable[[], None]:
        def ended() -> None:
            nonlocal periods
            periods += 1
            clear()

        return ended

    def period(function: Any, args: Any, kwargs: Any) -> str:
        own = function in _EXPLICIT or any(isinstance(a, torch.dtype) for a in (*args, *(kwargs or {}).values()))
        if own or not torch.is_autocast_cache_enabled() or not torch.is_grad_enabled():
            return ""
        kinds = [kind for kind in types if torch.is_autocast_enabled(kind)]
        return " ".join([str(periods), *(f"{kind}:{torch.get_autocast_dtype(kind)}" for kind in kinds)])

    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(enabled)
    try:
        with wrapped(torch, "clear_autocast_cache", counting):
            yield period
    finally:
        torch.set_autocast_cache_enabled(before)


def is_kept(tensor: torch.Tensor) -> bool:
    """Whether autocast keeps the casts of this tensor."""
    return tensor.requires_grad and tensor.is_leaf and not tensor._is_view()


def share_casts(module: fx.GraphModule, leaves: Collection[int], period: Callable[[fx.Node], str]) -> None:
    """Merge the casts of a joint graph that are one in eager, in place. ``leaves``: positions of the inputs that
    ``is_kept``; ``period``: the text of ``periods_of_casts`` for a node."""
    inputs = [*module.graph.find_nodes(op="placeholder")]
    kept = {inputs[position] for position in leaves}
    groups: dict[Group, list[fx.Node]] = {}
    for node in module.graph.nodes:
        if node.target is _TO_COPY and node.args[0] in kept and _is_kept_cast(node, period(node)):
            groups.setdefault((node.args[0], node.kwargs["dtype"], period(node)), []).append(node)
    group_of: dict[tuple[fx.Node, Any], Group] = {}
    served: dict[int, torch.Tensor] = {}  # value of the cast that is left, by the memory of each merged one
    for group, (first, *others) in groups.items():
        for cast in others:
            group_of.update({(group[0], found.meta.get("seq_nr")): group for found in (first, cast)})
            served[memory_of(cast.meta["val"])] = first.meta["val"]
            cast.replace_all_uses_with(first)
            module.graph.erase_node(cast)
    if not group_of:
        return
    for node in module.graph.nodes:
        node.meta["val"] = pytree.tree_map_only(
            torch.Tensor, lambda one: _in_memory_of(served, one), node.meta.get("val")
        )
    output: Any = module.graph.output_node()
    for role, gradient in zip(output.meta["role"], output.args[0], strict=True):
        if isinstance(role, Gradient) and isinstance(gradient, fx.Node):
            source = inputs[role.input]
            _regroup(gradient, {number: group for (node, number), group in group_of.items() if node is source})
    module.recompile()


def _in_memory_of(served: Mapping[int, torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or if it is a view of a merged cast, the same view of the cast that is left."""
    base = served.get(memory_of(tensor))
    return tensor if base is None else base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _is_kept_cast(cast: fx.Node, period: str) -> bool:
    """Whether this casts single precision to autocast's type, which alone is kept."""
    source: Any = cast.args[0]
    value = source.meta["val"]
    return value.dtype is torch.float32 and f"{value.device.type}:{cast.kwargs.get('dtype')}" in period.split()[1:]


def _regroup(gradient: fx.Node, group_of: Mapping[Any, Group]) -> None:
    """Sum the terms of one group before they are cast. Groups are known by the sequence numbers of their casts."""
    terms, sums = _summed(gradient)
    groups = [group_of.get(term.meta["seq_nr"]) if term.target is _TO_COPY else None for term in terms]
    if all(group is None or groups.count(group) == 1 for group in groups):
        return
    graph = gradient.graph
    totals: dict[Group, fx.Node] = {}
    result: fx.Node | None = None
    for position, (term, group) in enumerate(zip(terms, groups, strict=True)):
        before = (sums[position - 1] if position else term).next  # where to insert
        part: fx.Node | None = term
        if group is not None and groups.count(group) > 1:
            low: Any = term.args[0]
            totals[group] = low if group not in totals else _inserted(before, low, _ADD, totals[group], low)
            part = None
            if group not in groups[position + 1 :]:
                part = _inserted(before, term, _TO_COPY, totals[group], **term.kwargs)
        if part is not None:
            result = part if result is None else _inserted(before, term, _ADD, result, part)
    assert result is not None
    gradient.replace_all_uses_with(result)
    for node in (*reversed(sums), *terms):
        if not node.users:
            graph.erase_node(node)


def _summed(gradient: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """The terms of a sum in their order of arrival, and the additions, one fewer than terms."""
    terms: list[fx.Node] = []
    sums: list[fx.Node] = []
    node: Any = gradient
    while (
        node.target is _ADD
        and not node.kwargs
        and isinstance(node.args[1], fx.Node)
        and (node is gradient or len(node.users) == 1)
    ):
        terms.append(node.args[1])
        sums.append(node)
        node = node.args[0]
    return [node, *reversed(terms)], sums[::-1]


def _inserted(before: fx.Node, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    with before.graph.inserting_before(before):
        return added(like, target, *args, **kwargs)
