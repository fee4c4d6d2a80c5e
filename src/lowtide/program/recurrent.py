"""Recurrent layers over packed sequences: one layer in one direction as one operator per pass.

On the CPU, PyTorch computes such a layer step by step. These operators call the same kernels on the same elements in
the same order, so results and sums of gradients equal eager's. They keep one tensor of each kind for all steps, so a
graph does not grow with the lengths of sequences. ``LAYER``: their arguments. ``data`` has the rows of all steps one
after the other, ``sizes[i]`` rows for step ``i``. ``hidden`` is h, or h and c, of the first step of each sequence.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

NAMESPACE = "lowtide_recurrent"
LAYER = "Tensor data, Tensor[] hidden, Tensor[] weights, str kind, int[] sizes, bool reverse"
_ATEN = torch.ops.aten
State = tuple[Tensor, ...]
# Of rows and of what comes from h; of h beside that, or ``None``; of c, where there is one.
_Gradients = tuple[Tensor, Tensor, Tensor | None, State]


class _Simple:
    """``h' = f(gates)``, where the gates are the sum of the contributions of the input and of h."""

    states = 1
    kept: tuple[int, ...] = ()  # columns that the backward pass reads beside the result, as multiples of those of h

    def __init__(self, activation: Callable[[Tensor], Tensor], gradient: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.activation, self.gradient = activation, gradient

    def forward(self, rows: Tensor, of_hidden: Tensor, state: State) -> tuple[State, State]:
        """The next state, and the tensors to keep."""
        return (self.activation(of_hidden.add_(rows)),), ()

    def backward(self, gradients: State, state: State, result: Tensor, kept: State) -> _Gradients:
        gates = self.gradient(gradients[0], result)
        return gates, gates, None, ()


class _Gru:
    states = 1
    kept = (3, 1, 1)  # gates, of which the last third is not read; what comes from h for the new h, and that

    def forward(self, rows: Tensor, of_hidden: Tensor, state: State) -> tuple[State, State]:
        own, of_input = of_hidden.unsafe_chunk(3, 1), rows.unsafe_chunk(3, 1)
        reset, update = own[0].add_(of_input[0]).sigmoid_(), own[1].add_(of_input[1]).sigmoid_()
        from_hidden = own[2].clone()
        new = of_input[2].add(own[2].mul_(reset)).tanh_()
        return ((state[0] - new).mul_(update).add_(new),), (of_hidden, from_hidden, new)

    def backward(self, gradients: State, state: State, result: Tensor, kept: State) -> _Gradients:
        (reset, update, _), (from_hidden, new), (arrived,) = kept[0].unsafe_chunk(3, 1), kept[1:], gradients
        of_hidden = arrived * update
        of_update = _ATEN.sigmoid_backward(arrived * (state[0] - new), update)
        of_new = _ATEN.tanh_backward(arrived + of_hidden.neg(), new)
        of_reset = _ATEN.sigmoid_backward(of_new * from_hidden, reset)
        rows = torch.cat([of_reset, of_update, of_new], 1)
        return rows, torch.cat([of_reset, of_update, of_new * reset], 1), of_hidden, ()


class _Lstm:
    states = 2
    kept = (4, 1, 1)  # gates, c, and its hyperbolic tangent

    def forward(self, rows: Tensor, of_hidden: Tensor, state: State) -> tuple[State, State]:
        gates = of_hidden.add_(rows)
        chunks = gates.unsafe_chunk(4, 1)
        entering, forgetting = chunks[0].sigmoid_(), chunks[1].sigmoid_()
        new, leaving = chunks[2].tanh_(), chunks[3].sigmoid_()
        cell = (forgetting * state[1]).add_(entering * new)
        bent = cell.tanh()
        return (leaving * bent, cell), (gates, cell, bent)

    def backward(self, gradients: State, state: State, result: Tensor, kept: State) -> _Gradients:
        (entering, forgetting, new, leaving), bent = kept[0].unsafe_chunk(4, 1), kept[2]
        of_cell = gradients[1] + _ATEN.tanh_backward(gradients[0] * leaving, bent)
        gates = torch.cat(
            [
                _ATEN.sigmoid_backward(of_cell * new, entering),
                _ATEN.sigmoid_backward(of_cell * state[1], forgetting),
                _ATEN.tanh_backward(of_cell * entering, new),
                _ATEN.sigmoid_backward(gradients[0] * bent, leaving),
            ],
            1,
        )
        return gates, gates, None, (of_cell * forgetting,)


_CELLS: dict[str, Any] = {
    "rnn_tanh": _Simple(torch.tanh, _ATEN.tanh_backward),
    "rnn_relu": _Simple(torch.relu, lambda gradient, result: _ATEN.threshold_backward(gradient, result, 0)),
    "gru": _Gru(),
    "lstm": _Lstm(),
}
KINDS = tuple(_CELLS)


def _steps(sizes: Sequence[int], reverse: bool) -> list[tuple[int, int]]:
    """The first row and the size of each step, in the order in which they run."""
    steps = [(end - size, size) for end, size in zip(itertools.accumulate(sizes), sizes, strict=True)]
    return steps[::-1] if reverse else steps


def _forward(
    data: Tensor, hidden: Sequence[Tensor], weights: Sequence[Tensor], kind: str, sizes: Sequence[int], reverse: bool
) -> list[Tensor]:
    """The results of all steps, the last state of each sequence, and what the backward pass reads."""
    cell, biases = _CELLS[kind], weights[2:] or (None, None)
    with torch.no_grad():
        results = _results(data, hidden, weights, kind, sizes, reverse)
        result, last, kept = results[0], results[1 : 1 + cell.states], results[1 + cell.states :]
        rows = functional.linear(data, weights[0], biases[0])
        for state, first in zip(last, hidden, strict=True):
            state.copy_(first)
        # Of the first step as they are given: kernels of products ask where in memory a matrix begins.
        states = hidden
        for start, size in _steps(sizes, reverse):
            before = tuple(one.narrow(0, 0, size) for one in states)
            of_hidden = functional.linear(before[0], weights[1], biases[1])
            new, own = cell.forward(rows.narrow(0, start, size), of_hidden, before)
            for place, value in zip((result, *kept), (new[0], *own), strict=True):
                place.narrow(0, start, size).copy_(value)
            for place, value in zip(last, new, strict=True):
                place.narrow(0, 0, size).copy_(value)
            states = last
    return results


def _backward(
    gradients: Sequence[Tensor], given: Sequence[bool], wanted: Sequence[bool], result: Tensor, kept: Sequence[Tensor],
    data: Tensor, hidden: Sequence[Tensor], weights: Sequence[Tensor], kind: str, sizes: Sequence[int], reverse: bool,
) -> list[Tensor]:  # fmt: skip
    """The gradients of those of ``data, *hidden, *weights`` that are ``wanted``, from those of the results."""
    cell, terms = _CELLS[kind], iter(gradients)
    with torch.no_grad():
        arrived, *of_last = (next(terms) if is_given else None for is_given in given)
        states = [
            torch.zeros_like(first) if one is None else one.clone(memory_format=torch.contiguous_format)
            for one, first in zip(of_last, hidden, strict=True)
        ]
        of_rows = data.new_empty(data.shape[0], weights[0].shape[0])
        of_weights: list[Tensor | None] = [None, None]
        aside: Tensor | None = None  # what eager adds to the gradient of h before that which comes through the weights
        before = [*_before(result, kept, hidden, kind, sizes, reverse)]
        for start, size, same, state in reversed(before):
            own = tuple(one.narrow(0, start, size) for one in (result, *kept))
            coming = tuple(one.narrow(0, 0, size) for one in states)
            terms_of_h = [None if arrived is None else arrived.narrow(0, start, size), aside, coming[0]]
            now = (functools.reduce(torch.add, (one for one in terms_of_h if one is not None)), *coming[1:])
            of_step, of_hidden, aside, of_c = cell.backward(now, state, own[0], own[1:])
            torch.add(of_step, 0.0, out=of_rows.narrow(0, start, size))  # as where eager adds the zeros of other steps
            _add(of_weights, 0, of_hidden.t().mm(state[0]))
            if len(weights) > 2:
                _add(of_weights, 1, of_hidden.sum_to_size(of_hidden.shape[1]))
            of_h = of_hidden.mm(weights[1])
            if aside is not None and not same:
                of_h, aside = aside + of_h, None
            for old, new in zip(coming, (of_h, *of_c), strict=True):
                old.copy_(new)
        found = [of_rows.mm(weights[0]) if wanted[0] else None, *states, of_rows.t().mm(data), of_weights[0]]
        found += [of_rows.sum_to_size(of_rows.shape[1]), of_weights[1]][: len(weights) - 2]
    return [one for one, is_wanted in zip(found, wanted, strict=True) if is_wanted and one is not None]


def _add(sums: list[Tensor | None], place: int, term: Tensor) -> None:
    before = sums[place]
    sums[place] = term if before is None else before.add_(term)


def _before(
    result: Tensor, kept: Sequence[Tensor], hidden: Sequence[Tensor], kind: str, sizes: Sequence[int], reverse: bool
) -> Iterator[tuple[int, int, bool, State]]:
    """For each step: its first row, its size, whether the step before has the same size, and the state with which it
    begins."""
    states = (result, kept[1]) if kind == "lstm" else (result,)
    start_before, size_before = 0, 0
    for start, size in _steps(sizes, reverse):
        known = min(size_before, size)
        parts = [
            (one.narrow(0, start_before, known), first.narrow(0, known, size - known))
            for one, first in zip(states, hidden, strict=True)
        ]
        state = tuple(torch.cat(each, 0) if known else each[1] for each in parts)  # new ones, as in the forward pass
        yield start, size, size == size_before, state
        start_before, size_before = start, size


def _results(data: Tensor, hidden: Any, weights: Any, kind: str, sizes: Any, reverse: bool) -> list[Tensor]:
    rows, width, cell = data.shape[0], hidden[0].shape[1], _CELLS[kind]
    kept = (data.new_empty((rows, times * width)) for times in cell.kept)
    return [data.new_empty((rows, width)), *(one.new_empty(one.shape) for one in hidden), *kept]


def _gradients(
    gradients: Any,
    given: Any,
    wanted: Sequence[bool],
    result: Any,
    kept: Any,
    data: Tensor,
    hidden: Any,
    weights: Any,
    *layer: Any,
) -> list[Tensor]:
    inputs = zip((data, *hidden, *weights), wanted, strict=True)
    return [one.new_empty(one.shape) for one, is_wanted in inputs if is_wanted]


_LIBRARY = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]
_GRADIENTS = "Tensor[] gradients, bool[] given, bool[] wanted, Tensor result, Tensor[] kept"
_LIBRARY.define(f"forward({LAYER}) -> Tensor[]")  # type: ignore[no-untyped-call]
_LIBRARY.define(f"backward({_GRADIENTS}, {LAYER}) -> Tensor[]")  # type: ignore[no-untyped-call]
for _name, _function, _fake in (("forward", _forward, _results), ("backward", _backward, _gradients)):
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _fake, lib=_LIBRARY)
FORWARD, BACKWARD = torch.ops.lowtide_recurrent.forward.default, torch.ops.lowtide_recurrent.backward.default


class Recurrent(torch.autograd.Function):
    """A layer: ``apply(kind, sizes, reverse, number of hidden states, data, *hidden, *weights)``."""

    @staticmethod
    def forward(
        ctx: Any, kind: str, sizes: list[int], reverse: bool, count: int, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.layer, ctx.count = (kind, sizes, reverse), count
        results = FORWARD(inputs[0], inputs[1 : 1 + count], inputs[1 + count :], *ctx.layer)
        ctx.save_for_backward(results[0], *inputs, *results[1 + count :])
        return tuple(results[: 1 + count])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        result, *saved = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[4:])
        inputs, kept, count = saved[: len(wanted)], saved[len(wanted) :], ctx.count
        arrived, given = [one for one in gradients if one is not None], [one is not None for one in gradients]
        layer = (inputs[0], inputs[1 : 1 + count], inputs[1 + count :], *ctx.layer)
        found = iter(BACKWARD(arrived, given, wanted, result, kept, *layer))
        return None, None, None, None, *(next(found) if is_wanted else None for is_wanted in wanted)
