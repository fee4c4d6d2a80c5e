"""Questions that a model asked about values during capture, and how to ask them again in another call.

A value is described by how it was computed from integer inputs, constants and sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree

from lowtide.capture.trace.sizes import SYMBOLIC
from lowtide.program.references import map_leaves


@dataclass(frozen=True, slots=True, eq=False)
class Provenance:
    """How a known tensor was computed: a leaf (an input by position, or a constant) or an operator on known tensors."""

    function: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    output: int | None = None
    leaf: int | None = None
    constant: torch.Tensor | None = None
    depends_on_input: bool = False

    def positions(self) -> set[int]:
        """The positions of the inputs that the value was computed from."""
        return {known.leaf for known in self._behind() if known.leaf is not None}

    def is_constant(self) -> bool:
        """Whether the value depends neither on inputs nor on their sizes."""
        return not self.positions() and not any(
            isinstance(leaf, SYMBOLIC) for known in self._behind() for leaf in _leaves(known)
        )

    def parents(self) -> list[Provenance]:
        """The values that its operator reads, each as often as it does."""
        return [leaf for leaf in _leaves(self) if isinstance(leaf, Provenance)]

    def computed(self, value_of: Callable[[Any], Any], among: tuple[type, ...] = ()) -> Any:
        """Compute the value by its operator, with ``value_of`` for its parents and for those of its arguments that are
        ``among`` these."""
        args, kwargs = map_leaves((self.args, self.kwargs), (Provenance, *among), value_of)
        assert self.function is not None
        result = self.function(*args, **kwargs)
        return result if self.output is None else result[self.output]

    def _behind(self) -> Iterable[Provenance]:
        """The value itself, and all values that it was computed from."""
        found: dict[int, Provenance] = {}
        waiting = [self]
        while waiting:
            known = waiting.pop()
            if id(known) not in found:
                found[id(known)] = known
                waiting += known.parents()
        return found.values()


def _leaves(known: Provenance) -> list[Any]:
    leaves: list[Any] = pytree.tree_leaves((known.args, known.kwargs))
    return leaves


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """A question that the model asked while it was captured, and the answer it got.

    ``holds(inputs)`` asks again: ``inputs`` are the call's flat tensors, in capture's order.
    """

    known: Provenance
    ask: str
    answer: Any
    source: str

    def holds(self, inputs: Sequence[torch.Tensor], memo: dict[int, Any]) -> bool:
        return bool(self.asked(inputs, memo) == self.answer)

    def asked(self, inputs: Sequence[torch.Tensor], memo: dict[int, Any]) -> Any:
        """The answer for ``inputs``."""
        with torch.no_grad():
            return _ask(self.ask, _evaluate(self.known, inputs, memo))


def _ask(ask: str, real: Any) -> Any:
    asked: dict[str, Callable[[Any], Any]] = {
        "shape": lambda tensor: tuple(tensor.shape), "item": torch.Tensor.item, "values": torch.Tensor.tolist, "bool": bool
    }  # fmt: skip
    return asked[ask](real)


def _evaluate(known: Provenance, inputs: Sequence[torch.Tensor], memo: dict[int, Any]) -> Any:
    if known.leaf is not None:
        return inputs[known.leaf]
    if known.constant is not None:
        return known.constant
    key = id(known)
    if key not in memo:
        memo[key] = known.computed(lambda one: _evaluate(one, inputs, memo))
    return memo[key]
