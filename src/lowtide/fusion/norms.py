"""Split normalizations into statistics and the pointwise step that applies them.

Batch and group normalization return the normalized tensor and two small statistics. After the split, the tensor is
pointwise in the input: it fuses with the following activation, is recomputed inside backward kernels, and need not be
saved. The operator stays for its statistics; its kernel computes nothing else.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from lowtide.capture.trace.recorder import added

_ATEN = torch.ops.aten
_BATCH_NORM, _GROUP_NORM = _ATEN._native_batch_norm_legit_functional.default, _ATEN.native_group_norm.default


def split_norms(module: fx.GraphModule) -> None:
    """Replace the first result of every batch and group normalization of ``module`` by pointwise operators, in
    place."""
    for node in list(module.graph.nodes):
        if node.target not in (_BATCH_NORM, _GROUP_NORM) or not _is_whole(node):
            continue
        results = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        if 0 not in results or results[0].meta["val"].stride() != node.args[0].meta["val"].stride():
            continue
        normal = results[0]
        applied = _apply(_Inserter(node, results), node)
        _take_place(normal, applied)
        normal.replace_all_uses_with(applied)
        module.graph.erase_node(normal)


def _take_place(normal: fx.Node, applied: fx.Node) -> None:
    """Views of the normalized tensor become views of the new result. The operator's own first result becomes another
    tensor."""
    seen, node = normal.meta["val"], normal.args[0]
    assert isinstance(node, fx.Node)
    with seen.fake_mode:
        own = torch.empty_strided(seen.shape, seen.stride(), dtype=seen.dtype, device=seen.device)
        if applied.target is _ATEN.view.default:  # without weights: the bytes belong to a tensor of another shape
            formed: Any = applied.args[0]
            formed.meta["val"] = seen.view(formed.meta["val"].shape)
    node.meta["val"] = (own, *node.meta["val"][1:])
    applied.meta["val"] = seen


def _is_whole(node: fx.Node) -> bool:
    """Whether only single results of the node are used, and its type is one in which statistics are kept too."""
    plain = all(user.target is operator.getitem for user in node.users)
    value = node.args[0].meta["val"] if isinstance(node.args[0], fx.Node) else None
    return plain and value is not None and value.dtype in (torch.float32, torch.float64) and value.dim() > 1


class _Inserter:
    """Inserts operators after the results of a node, with the node's metadata."""

    def __init__(self, node: fx.Node, results: dict[Any, fx.Node]) -> None:
        self.node = node
        self.results = results
        self.after = max(results.values(), key=list(node.graph.nodes).index)

    def result(self, index: int) -> fx.Node:
        """Result ``index`` of the normalization."""
        if index not in self.results:
            self.results[index] = self(operator.getitem, self.node, index)
        return self.results[index]

    def __call__(self, target: Callable[..., Any], *args: Any) -> fx.Node:
        with self.node.graph.inserting_after(self.after):
            self.after = added(self.node, target, *args)
        return self.after


def _apply(add: _Inserter, node: fx.Node) -> fx.Node:
    """The normalized tensor from the statistics, by groups of channels or by channel; then weight and bias."""
    arguments: tuple[Any, ...] = node.args
    x, weight, bias, *geometry = arguments
    sizes = list(x.meta["val"].shape)
    small = by_channel = [1, -1, *(1 for _ in sizes[2:])]
    grouped = None
    if node.target is _GROUP_NORM:
        batch, channels, _, groups, _ = geometry
        grouped = [batch, groups, channels // groups, *sizes[2:]]
        small = [batch, groups, *(1 for _ in grouped[2:])]
    mean, scale = (add(_ATEN.view.default, add.result(i), small) for i in (1, 2))
    parts = x if grouped is None else add(_ATEN.view.default, x, grouped)
    normal = add(_ATEN.mul.Tensor, add(_ATEN.sub.Tensor, parts, mean), scale)
    if grouped is not None:
        normal = add(_ATEN.view.default, normal, sizes)
    for operation, operand in ((_ATEN.mul.Tensor, weight), (_ATEN.add.Tensor, bias)):
        if operand is not None:
            normal = add(operation, normal, add(_ATEN.view.default, operand, by_channel))
    return normal
