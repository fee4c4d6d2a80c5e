"""Roles of a joint graph's placeholders and outputs, in ``meta["role"]`` of their nodes; a list for the output node.

Inputs and outputs are numbered in the order in which the traced function takes and returns them.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Input:
    number: int


@dataclass(frozen=True, slots=True)
class Tangent:
    """The gradient that arrives at an ``output`` (its tangent)."""

    output: int


@dataclass(frozen=True, slots=True)
class Output:
    number: int


@dataclass(frozen=True, slots=True)
class Written:
    """The final contents of an ``input`` that the function has written to."""

    input: int


@dataclass(frozen=True, slots=True)
class Gradient:
    """The gradient of an ``input``, which arrived in ``arrived`` terms."""

    input: int
    arrived: int = field(default=1, kw_only=True, compare=False)


@dataclass(frozen=True, slots=True)
class Term(Gradient):
    """One of the ``count`` terms of a summed gradient, in the order in which the autograd engine adds them."""

    number: int
    count: int
