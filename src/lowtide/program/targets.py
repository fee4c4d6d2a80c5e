"""Operators of this project that captured programs call beside ATen's."""

from __future__ import annotations

import torch


def tangent() -> torch.Tensor:
    """The gradient that arrives for a forward output. Never called: the caller hands it in."""
    raise NotImplementedError("a tangent is an input of the backward pass")


def own_layout(gradient: torch.Tensor, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    """A copy of ``gradient`` in a storage of its own with the parameter's layout.

    The autograd engine copies a gradient that it cannot take over as it is (another layout, or shared memory); doing so
    in the program keeps the copy inside the plan.
    """
    return torch.empty_strided(shape, stride, dtype=gradient.dtype, device=gradient.device).copy_(gradient)


def bernoulli(
    layout: tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device],
    probability: float,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """``empty_like(x).bernoulli_(p)``, which is ``bernoulli(empty_like(x), p)`` in a functional graph.

    The functional operator returns a contiguous tensor whatever the layout of ``x``, so the same random numbers would
    go to other elements. This one fills the memory in eager's order.
    """
    shape, stride, dtype, device = layout
    return torch.empty_strided(shape, stride, dtype=dtype, device=device).bernoulli_(probability, generator=generator)


def update(target: torch.Tensor, value: torch.Tensor, unseen: bool = False) -> None:
    """Write a changed buffer (or argument), once, at the end of the forward pass or as soon as its value is computed.
    If an operator gave it another shape (observers of quantization at their first call), it gets that shape.
    ``unseen``: without a new version for autograd."""
    if target.shape != value.shape:
        target.resize_(value.shape)
    (target.data if unseen else target).copy_(value)


class UnexpectedValueError(Exception):
    """Raised if a value that the forward pass checks is not as expected. ``number``: which value."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class FailedOperatorError(Exception):
    """Raised if an operator fails where the model's own code may continue; that code runs instead."""


def expect(value: torch.Tensor, answer: bool, number: int) -> None:
    """Raise ``UnexpectedValueError`` if a truth value is not the one that the program was captured with."""
    if bool(value) is not answer:
        raise UnexpectedValueError(number)


def read_number(value: torch.Tensor, number: int) -> torch.Tensor:
    """The element of a one-element tensor that Python code reads as a number, the ``number``-th that it reads."""
    return value.reshape(()).clone()


def keep_value(tensor: torch.Tensor) -> torch.Tensor:
    """The value of a tensor that the forward pass overwrites, for operators that read it in the backward pass."""
    return tensor.clone()
