"""A captured training program: the plain graph, and beside it what torch needs to run it.

The graph (``ir.Graph``) knows names, bytes and dependencies; this module adds, per op, the call that executes it and,
per value, the layout of the tensor. Everything after capture (cost, lowering) reads these two columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lowtide.ir import Graph


@dataclass(frozen=True, slots=True)
class Ref:
    """Stands for a tensor argument: the id of the value to pass."""

    value: int


@dataclass(frozen=True, slots=True)
class Call:
    """How to run an op: ``target(*args, **kwargs)`` with every ``Ref``, nested ones too, replaced by its tensor.

    ``positions`` is ``None`` where the target returns a single tensor; otherwise it holds, for each output value of the
    op, its index in the sequence that the target returns.
    """

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    positions: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Layout of a value; ``storage_bytes`` is the size of the whole storage that it lives in."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    storage_offset: int
    storage_bytes: int


@dataclass(frozen=True, slots=True)
class Result:
    """One tensor of the model's result.

    ``returned``: its position among the graph's forward outputs; or ``argument``: the flat input that it is or views; or
    ``base``: the forward output that it views. ``view`` is (shape, stride, offset) where it is a view, else ``None``.
    ``requires_grad`` as in eager.
    """

    requires_grad: bool
    returned: int | None = None
    argument: int | None = None
    base: int | None = None
    view: tuple[tuple[int, ...], tuple[int, ...], int] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """A captured training program.

    ``calls`` has one entry per op and ``metas`` one per value. Flat inputs are the model's parameters and buffers
    (``state_names``, each tensor once), then the call's distinct tensors; ``inputs[i]`` is the value of flat input i, or
    ``None`` where the program does not read it. ``constants`` are the values of tensors that the model holds outside of
    its parameters and buffers. ``tangents[i]`` is the forward output that the i-th ``lowtide.tangent`` op belongs to.
    ``gradients`` pairs a flat input with the value of its gradient. ``mask`` tells for which results a gradient is
    expected, and in which layout (``capture.module.GradientMask``). ``questions`` are what the program's shape depends
    on, see ``capture.fake``.
    ``result_structure`` is of a pair: what the model returned, and what it left in the attributes ``assigned`` (module path and
    name), see ``capture.attributes``.
    ``kept`` are the flat inputs whose first values, overwritten by the forward pass, are its last forward outputs.
    """

    graph: Graph
    calls: tuple[Call, ...]
    metas: tuple[TensorMeta, ...]
    inputs: tuple[int | None, ...]
    constants: dict[int, torch.Tensor]
    tangents: tuple[int, ...]
    gradients: tuple[tuple[int, int], ...]
    results: tuple[Result, ...]
    result_structure: Any
    mask: tuple[bool | tuple[int, ...], ...]
    reassigned: dict[str, int]
    questions: tuple[Any, ...]
    state_names: tuple[tuple[str, ...], ...]
    parameters: int
    kept: tuple[int, ...]
    assigned: tuple[tuple[str, str], ...] = ()

    @property
    def answers(self) -> tuple[Any, ...]:
        """What the questions were answered, to tell programs of one signature apart."""
        return tuple((question.source, question.ask, question.answer) for question in self.questions)
