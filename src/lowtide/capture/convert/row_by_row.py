"""What a joint graph computes row by row from one projection to classes: the logits of a loss, and what follows from
them.

The walk follows views, slices of rows, pointwise operators, log-softmax and their gradients. These have a row of
classes for each row of hidden states. The region ends at sums, reductions of rows, and matrix products.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lowtide.capture.convert.nodes import is_backward

_ATEN = torch.ops.aten
MM, ADDMM, TURN, EXPAND = _ATEN.mm.default, _ATEN.addmm.default, _ATEN.t.default, _ATEN.expand.default
SLICE, SLICE_BACKWARD = _ATEN.slice.Tensor, _ATEN.slice_backward.default
LOG_SOFTMAX, SUM, ARGMAX = _ATEN._log_softmax.default, _ATEN.sum.dim_IntList, _ATEN.argmax.default
NLL, NLL_BACKWARD = _ATEN.nll_loss_forward.default, _ATEN.nll_loss_backward.default
# Operators that keep the rows and their order.
SAME = {
    *(_ATEN.view.default, _ATEN._unsafe_view.default, _ATEN.clone.default),
    *(_ATEN.detach.default, _ATEN.alias.default),
}
WITH_DIM = {LOG_SOFTMAX: 1, _ATEN._log_softmax_backward_data.default: 2}  # position of the ``dim`` argument
_OF_A_ROW = {SUM, _ATEN.mean.dim, _ATEN.amax.default, _ATEN.logsumexp.default, ARGMAX}


class Whole(Exception):
    """Raised with the reason why a loss cannot be computed in pieces."""


def projection_of(node: fx.Node) -> fx.Node | None:
    """The matrix product from which a log-softmax is computed row by row, if there is one."""
    classes = value_of(node).shape[-1]
    while node.target not in (MM, ADDMM):
        if not _goes_on(node.target):
            return None
        before = [one for one in node.all_input_nodes if value_of(one).dim() > 1 and value_of(one).shape[-1] == classes]
        if len(before) != 1:
            return None
        node = before[0]
    return node


def _goes_on(target: Any) -> bool:
    return target in SAME or target in WITH_DIM or target is SLICE or _is_pointwise(target)


def _is_pointwise(target: Any) -> bool:
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    return torch.Tag.pointwise in target.tags or target is _ATEN._to_copy.default


def value_of(node: Any) -> torch.Tensor:
    value: torch.Tensor = node.meta["val"]
    return value


def _source(node: Any) -> Any:
    while isinstance(node, fx.Node) and node.target in (_ATEN.detach.default, _ATEN.alias.default):
        node = node.args[0]
    return node


class Region:
    """What is computed row by row from one projection. ``wide``: nodes with a row of classes for each row of hidden
    states, with the slices that precede them. ``turned``: their transposes. ``ends``: nodes that leave the region."""

    def __init__(self, projection: fx.Node) -> None:
        self.projection, self.graph = projection, projection.graph
        self.hidden: Any = projection.args[-2]
        self.classes = int(value_of(projection).shape[1])
        self.wide: dict[fx.Node, tuple[fx.Node, ...]] = {projection: ()}
        self.turned: dict[fx.Node, fx.Node] = {}
        self.spread: set[fx.Node] = set()  # wide tensors made from one number for each row, without logits
        self._beside: list[fx.Node] = []  # wide nodes that are read together with one number for each row
        self.ends: list[fx.Node] = []
        self.slices: tuple[fx.Node, ...] = ()
        nodes = list(self.graph.nodes)
        for node in nodes[nodes.index(projection) + 1 :]:
            if any(one in self.wide or one in self.turned for one in node.all_input_nodes):
                self._place(node)
        if not any(end.target is NLL for end in self.ends):
            raise Whole("no nll_loss follows its log-softmax")
        self.rows = self._rows(self.slices)
        self._check_ends()

    def members(self) -> set[fx.Node]:
        return {*self.wide, *self.turned, *self.spread, *self.ends}

    def _shape(self) -> list[int]:
        return list(value_of(self.projection).shape)

    def _rows(self, slices: Sequence[fx.Node]) -> int:
        last = slices[-1] if slices else self.projection
        return math.prod(value_of(last).shape[:-1])

    def _place(self, node: fx.Node) -> None:
        target: Any = node.target
        first: Any = node.args[0] if node.args else None
        if node.op == "output":
            raise Whole(f"the logits {self._shape()} are returned, so they exist as a whole; return the loss alone")
        if self._is_end(node):
            self.ends.append(node)
        elif target is TURN and first in self.wide:
            self.turned[node] = first
        else:
            self.wide[node] = self._slices_of(node)

    def _slices_of(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """The slices that precede a wide node. Raises ``Whole`` if the node is not computed row by row."""
        read = [one for one in node.all_input_nodes if one in self.wide]
        known = {self.wide[one] for one in read}
        target: Any = node.target
        args, value = node.args, node.meta["val"]
        if len(known) != 1 or not isinstance(value, torch.Tensor) or value.shape[-1:] != (self.classes,):
            raise self._other(node)
        slices = known.pop()
        if target is SLICE and not is_backward(node) and args[1] not in (-1, value.dim() - 1):
            if slices != self.slices:
                raise self._other(node)  # losses of different sets of rows
            self.slices = (*slices, node)
            return self.slices
        if target is SLICE_BACKWARD and slices and _same_slice(slices[-1], node):
            return slices[:-1]
        if math.prod(value.shape[:-1]) != self._rows(slices):
            raise self._other(node)
        if target in WITH_DIM and args[WITH_DIM[target]] in (-1, value.dim() - 1):
            return slices
        if target in SAME or target is NLL_BACKWARD:
            return slices
        if not _is_pointwise(target) or not all(self._is_operand(one, read[0]) for one in node.all_input_nodes):
            raise self._other(node)
        return slices

    def _is_operand(self, node: fx.Node, beside: fx.Node) -> bool:
        """Whether a pointwise operator may read the node ``beside`` a wide one."""
        value, wide = value_of(node), value_of(beside).shape
        if node in self.wide or (value.dim() <= 2 and value.shape[:-1].numel() == 1):
            return True
        self._beside.append(beside)
        if value.shape == (*wide[:-1], 1):
            return True
        spread = value.shape == wide and self._is_spread(node, beside)
        if spread:
            self.spread.add(node)
        return spread

    def _is_spread(self, node: fx.Node, beside: fx.Node) -> bool:
        """Whether a tensor as wide as ``beside`` is made from one number for each row, without the logits."""
        if node.target is EXPAND:
            source = value_of(node.args[0])
            return source.numel() == 1 or source.shape == (*value_of(beside).shape[:-1], 1)
        return _is_pointwise(node.target) and all(self._is_operand(one, beside) for one in node.all_input_nodes)

    def _is_end(self, node: fx.Node) -> bool:
        first: Any = node.args[0] if node.args else None
        if node.target is MM:
            return True
        if node.target is NLL:
            return first in self.wide
        if node.target not in _OF_A_ROW or first not in self.wide:
            return False
        return self._is_of_a_row(node) or self._is_over_rows(node)

    def _is_of_a_row(self, node: fx.Node) -> bool:
        dim: Any = node.args[1] if len(node.args) > 1 else None
        dims = dim if isinstance(dim, (list, tuple)) else [dim]
        return len(dims) == 1 and dims[0] in (-1, value_of(node.args[0]).dim() - 1)

    def _is_over_rows(self, node: fx.Node) -> bool:
        return node.target is SUM and value_of(node.args[0]).dim() == 2 and node.args[1] == [0] and not node.kwargs

    def sums_rows(self, node: fx.Node) -> bool:
        """Whether an end is a sum over all rows, and not a result for each row."""
        if node.target is MM:
            left, right = node.args
            if left in self.turned and _source(right) is _source(self.hidden):
                return True
            return right in self.wide and self._is_turned_hidden(left)
        return node.target is SUM and self._is_over_rows(node)

    def _is_turned_hidden(self, node: Any) -> bool:
        return isinstance(node, fx.Node) and node.target is TURN and _source(node.args[0]) is _source(self.hidden)

    def _check_ends(self) -> None:
        if any(self.wide[one] != self.slices for one in self._beside):
            raise self._other(self._beside[0])
        for end in self.ends:
            if end.target is MM and not self.sums_rows(end) and end.args[0] not in self.wide:
                raise self._other(end)
            before: Any = end.args[0]
            if before in self.wide and not is_backward(end) and self.wide[before] != self.slices:
                raise self._other(end)

    def _other(self, node: fx.Node) -> Whole:
        return Whole(f"{node.target} reads the logits {self._shape()} in a way that is not known to go row by row")


def _same_slice(forward: fx.Node, backward: fx.Node) -> bool:
    _, _, dim, start, end, step = backward.args
    known = (*forward.args[1:], *(0, None, None, 1)[len(forward.args) - 1 :])
    return known == (dim, start, end, step)
