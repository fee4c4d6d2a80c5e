"""What the placeholders of a joint graph are, and what its output node returns: in ``meta["role"]``, of the latter a list.

Inputs and outputs are numbered in the order in which the traced function takes and returns them.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Input:
    number: int


@dataclass(frozen=True, slots=True)
class Tangent:
    """The gradient that arrives at an ``output``."""

    output: int


@dataclass(frozen=True, slots=True)
class Output:
    number: int


@dataclass(frozen=True, slots=True)
class Written:
    """What the function has written into an ``input``."""

    input: int


@dataclass(frozen=True, slots=True)
class Gradient:
    """The gradient of an ``input``, which has come in so many terms (``arrived``)."""

    input: int
    arrived: int = field(default=1, kw_only=True, compare=False)


@dataclass(frozen=True, slots=True)
class Term(Gradient):
    """One of the ``count`` terms that a gradient is the sum of, in the order in which the engine adds them."""

    number: int
    count: int
