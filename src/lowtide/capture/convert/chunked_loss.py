"""A projection to classes and its cross-entropy, in pieces: logits that never exist as a whole.

With many classes (a vocabulary) the logits, their log-softmax and its gradient are the largest tensors of a step, and every
row of them is computed by itself: from a row of the hidden states, which is small, to one number of the loss. ``chunk_losses``
finds in a joint graph what is computed row by row from such a projection (``row_by_row``), and writes it down once for each
piece of the rows, piece after piece, in either pass::

    logits      mm or addmm of hidden states and a weight, at first
    row by row  views, slices of rows, pointwise operators, log-softmax, and their gradients
    ends        nll_loss, or a reduction of each row, in the forward pass; in the backward pass the gradients of the hidden
                states (the pieces' one after the other), of the weight and the bias (sums over rows, hence over pieces)

Pieces are operators like all others: a plan keeps them for the backward pass, or computes a piece's logits again when its turn
comes. So nothing need be known of the gradient of the loss beforehand, as it must where gradients are computed in the
forward pass (``F.linear_cross_entropy``): a loss scale of float16 acts where it does in eager, and every row is eager's. What
differs are sums over rows, which are added up piece by piece, and with them the last bits.
"""

from __future__ import annotations

import logging
import math
import operator
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import fx, nn

from lowtide.capture.convert.nodes import is_backward
from lowtide.capture.convert.row_by_row import (
    ADDMM,
    ARGMAX,
    EXPAND,
    LOG_SOFTMAX,
    MM,
    NLL,
    NLL_BACKWARD,
    SAME,
    SLICE,
    SLICE_BACKWARD,
    SUM,
    TURN,
    WITH_DIM,
    Region,
    Whole,
    projection_of,
    value_of,
)
from lowtide.capture.trace.recorder import added
from lowtide.ir.graph import LOGITS_PIECE

_LOG = logging.getLogger(__name__)
_SAID: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models whose whole losses the log has reported
_ATEN = torch.ops.aten
_VIEW = _ATEN.view.default
_MEAN, _ADD_UP = 1, 2  # reductions of nll_loss
_MOST_PIECES = 16


def pieces_of(rows: int, classes: int, hidden: int) -> int:
    """The number of pieces: so many that the logits of a piece are as large as all hidden states, at most 16."""
    return max(1, min(_MOST_PIECES, math.ceil(classes / hidden), rows))


def chunk_losses(model: nn.Module, module: fx.GraphModule, part: bool = False) -> None:
    """Compute the losses in the joint graph of ``model`` in pieces, in place. If one stays whole, the log says why,
    once. ``part``: the model is a part of a larger one, so no loss is expected."""
    refused, seen = list[str](), set[fx.Node]()
    for node in list(module.graph.nodes):
        projection = projection_of(node) if node.target is LOG_SOFTMAX and node not in seen else None
        if projection is None:
            continue
        try:
            region = Region(projection)
            seen |= region.members()
            _Writer(region).write()
        except Whole as why:
            refused.append(f"changes nothing for a loss of {type(model).__name__}: {why}")
    if not (seen or refused or part):
        refused.append(
            f"changes nothing: {type(model).__name__} computes no matrix product whose rows go through log_softmax to nll_loss "
            "(F.cross_entropy of logits) in its forward pass"
        )
    if refused and model not in _SAID:
        _SAID.add(model)
        for reason in refused:
            _LOG.warning("chunked_loss=True %s", reason)


class _Writer:
    """Writes the pieces of a region in place of the region's nodes."""

    def __init__(self, region: Region) -> None:
        self.region, self.graph = region, region.graph
        width = int(value_of(region.hidden).shape[1])
        self.count = pieces_of(region.rows, region.classes, width)
        if region.rows < 2:
            raise Whole("there is just one row of logits")
        if self.count < 2:
            raise Whole(f"the logits are no larger than the hidden states ({region.classes} classes from {width})")
        size = math.ceil(region.rows / self.count)
        self.bounds = [(at, min(at + size, region.rows)) for at in range(0, region.rows, size)]
        self.known: dict[tuple[fx.Node, int], fx.Node] = {}

    def write(self) -> None:
        both = ([end for end in self.region.ends if is_backward(end) is way] for way in (False, True))
        ends = [group for group in both if group]
        late = [self._late(group) for group in ends]
        for group, following in zip(ends, late, strict=True):
            self._write(group, following)
        gone = self.region.members()
        gone |= {user for node in gone if node.target is NLL for user in node.users}
        for node in reversed(list(self.graph.nodes)):
            if node in gone and not node.users:
                self.graph.erase_node(node)

    def _late(self, ends: Sequence[fx.Node]) -> list[fx.Node]:
        """The nodes before the last of the ``ends`` that depend on one of them."""
        members, late = self.region.members(), dict.fromkeys(ends)
        node = ends[0]
        while node is not ends[-1]:
            node = node.next
            if node not in members and any(one in late for one in node.all_input_nodes):
                late[node] = None
                if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                    raise Whole(f"{node.target} would draw its numbers after others")
            if node in members and any(one in late and one not in members for one in node.all_input_nodes):
                raise Whole(f"{node.target} needs what the whole loss gives")
        return [node for node in late if node not in members]

    def _write(self, ends: Sequence[fx.Node], late: Iterable[fx.Node]) -> None:
        """Write the pieces of the ``ends`` of one pass after the last of these, and move ``late`` nodes behind them."""
        anchor = ends[-1].next
        with self.graph.inserting_before(anchor):
            parts: dict[fx.Node, list[Any]] = {end: [] for end in ends}
            for number in range(len(self.bounds)):
                for end in ends:
                    parts[end].append(self._part(end, number, parts[end]))
            for end in ends:
                self._replace(end, parts[end])
        for node in late:
            anchor.prepend(node)

    def _piece(self, node: fx.Node, number: int) -> fx.Node:
        """The rows of a wide node that are in a piece, as a matrix."""
        if (node, number) not in self.known:
            self.known[node, number] = self._new_piece(node, number)
        return self.known[node, number]

    def _new_piece(self, node: fx.Node, number: int) -> fx.Node:
        target: Any = node.target
        args: Any = node.args
        if node is self.region.projection:
            name = f"{LOGITS_PIECE}{number + 1}_of_{len(self.bounds)}"
            return added(node, target, *args[:-2], self._hidden(number), args[-1], name=name)
        if node in self.region.turned:
            return added(node, TURN, self._piece(args[0], number))
        if target in SAME or target in (SLICE, SLICE_BACKWARD):
            return self._piece(args[0], number)
        if target is EXPAND:
            return self._spread(node, number)
        if target is NLL_BACKWARD:
            gradient, logs, labels, *others = args
            own = self._rows_of(node, gradient, number) if value_of(gradient).dim() else gradient
            return added(node, target, own, self._piece(logs, number), self._rows_of(node, labels, number), *others)
        own = fx.map_arg(args, lambda one: self._operand(node, one, number))
        if target in WITH_DIM:
            own = (*own[: WITH_DIM[target]], 1, *own[WITH_DIM[target] + 1 :])
        return added(node, target, *own, **cast(Any, node.kwargs))

    def _operand(self, node: fx.Node, operand: fx.Node, number: int) -> fx.Node:
        if operand in self.region.wide or operand in self.region.spread:
            return self._piece(operand, number)
        value = value_of(operand)
        if value.dim() > 1 and value.shape[-1] == 1 and value.numel() > 1:
            return self._rows_of(node, operand, number, 1)
        return operand

    def _spread(self, node: fx.Node, number: int) -> fx.Node:
        """One number for each row of a piece, repeated for all classes."""
        start, end = self.bounds[number]
        source = node.args[0]
        one = value_of(source).numel() == 1
        rows = added(node, _VIEW, source, [1, 1]) if one else self._rows_of(node, source, number, 1)
        return added(node, EXPAND, rows, [end - start, self.region.classes])

    def _rows_of(self, like: fx.Node, node: Any, number: int, *width: int) -> fx.Node:
        """The piece of a tensor that has one number for each row."""
        if value_of(node).dim() != 1 + len(width):
            node = added(like, _ATEN.reshape.default, node, [self.region.rows, *width])
        return added(like, SLICE, node, 0, *self.bounds[number])

    def _hidden(self, number: int) -> fx.Node:
        region = self.region
        if (region.hidden, number) not in self.known:
            whole = (region.hidden, -1)
            if whole not in self.known:
                self.known[whole] = self._sliced(region.hidden) if region.slices else region.hidden
            piece = added(region.projection, SLICE, self.known[whole], 0, *self.bounds[number])
            self.known[region.hidden, number] = piece
        return self.known[region.hidden, number]

    def _sliced(self, hidden: fx.Node) -> fx.Node:
        """The hidden states of the rows that remain after slices of logits."""
        like, width = self.region.projection, value_of(hidden).shape[1]
        for one in self.region.slices:
            hidden = added(like, _VIEW, hidden, [*value_of(one.args[0]).shape[:-1], width])
            hidden = added(like, SLICE, hidden, *one.args[1:])
            hidden = added(like, _ATEN.clone.default, hidden, memory_format=torch.contiguous_format)
        return added(like, _VIEW, hidden, [self.region.rows, width])

    def _part(self, end: fx.Node, number: int, before: Sequence[Any]) -> Any:
        """The contribution of a piece to an end; for a product that sums over rows, the sum so far."""
        region, target, args = self.region, cast(Any, end.target), cast(Any, end.args)
        if target is NLL:
            return self._loss(end, number)
        if target is not MM and region.sums_rows(end):
            return added(end, SUM, self._piece(args[0], number), [0], True)
        if target is not MM:
            dim = 1 if target is ARGMAX else [1]
            return added(end, target, self._piece(args[0], number), dim, *args[2:], **cast(Any, end.kwargs))
        if not region.sums_rows(end):
            return added(end, MM, self._piece(args[0], number), args[1])
        left, right = (self._factor(end, one, number) for one in args)
        if not before:
            return added(end, MM, left, right)
        return added(end, ADDMM, before[-1], left, right)

    def _factor(self, end: fx.Node, node: Any, number: int) -> fx.Node:
        if node in self.region.wide or node in self.region.turned:
            return self._piece(node, number)
        hidden = self._hidden(number)
        return added(end, TURN, hidden) if node.target is TURN else hidden

    def _loss(self, end: fx.Node, number: int) -> Any:
        """The loss of a piece and the weight of its labels, as sums in at least float32; or the loss of each row."""
        logs, labels, weight, reduction, ignored = cast(Any, end.args)
        piece = self._piece(logs, number)
        if reduction and value_of(piece).dtype.itemsize < 4:
            piece = added(end, _ATEN._to_copy.default, piece, dtype=torch.float32)
            weight = weight and added(end, _ATEN._to_copy.default, weight, dtype=torch.float32)
        own = self._rows_of(end, labels, number)
        both = added(end, NLL, piece, own, weight, _ADD_UP if reduction else 0, ignored)
        return [added(end, operator.getitem, both, index) for index in (0, 1)]

    def _replace(self, end: fx.Node, parts: Sequence[Any]) -> None:
        if end.target is NLL:
            self._replace_loss(end, parts)
        elif not self.region.sums_rows(end):
            end.replace_all_uses_with(self._joined(end, parts))
        elif end.target is MM:
            end.replace_all_uses_with(parts[-1])
        else:
            end.replace_all_uses_with(added(end, SUM, added(end, _ATEN.cat.default, list(parts)), *end.args[1:]))

    def _replace_loss(self, end: fx.Node, parts: Sequence[Any]) -> None:
        whole, weight = end.meta["val"]
        if end.args[3]:
            stacks = (added(end, _ATEN.stack.default, list(column)) for column in zip(*parts, strict=True))
            loss, total = (added(end, _ATEN.sum.default, stack) for stack in stacks)
            loss = added(end, _ATEN.div.Tensor, loss, total) if end.args[3] == _MEAN else loss
        else:
            loss, total = added(end, _ATEN.cat.default, [own for own, _ in parts]), parts[0][1]
        results = [self._as(end, one, like.dtype) for one, like in ((loss, whole), (total, weight))]
        for user in list(end.users):
            user.replace_all_uses_with(results[cast(int, user.args[1])])

    def _as(self, end: fx.Node, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        return node if value_of(node).dtype == dtype else added(end, _ATEN._to_copy.default, node, dtype=dtype)

    def _joined(self, end: fx.Node, parts: Sequence[fx.Node]) -> fx.Node:
        """The results for each row, concatenated, with nothing for rows that slices left out."""
        whole = added(end, _ATEN.cat.default, list(parts))
        if end.target is MM:
            behind = self.region.wide[cast(fx.Node, end.args[0])]
            for one in reversed(self.region.slices[len(behind) :]):
                sizes, width = list(value_of(one.args[0]).shape[:-1]), value_of(whole).shape[-1]
                whole = added(end, _VIEW, whole, [*value_of(one).shape[:-1], width])
                place = (*one.args[1:], *(0, None, None, 1)[len(one.args) - 1 :])
                whole = added(end, SLICE_BACKWARD, whole, [*sizes, width], *place)
        shape = list(value_of(end).shape)
        return whole if list(value_of(whole).shape) == shape else added(end, _VIEW, whole, shape)
