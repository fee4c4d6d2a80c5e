"""Losses that a program computes in pieces, read from its graph: the number of pieces, and how far sums may differ from
eager's."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import NamedTuple

from lowtide.ir import Graph
from lowtide.ir.graph import LOGITS_PIECE

_PIECE = re.compile(rf"{LOGITS_PIECE}(\d+)_of_(\d+)")
_UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


class ChunkedLoss(NamedTuple):
    """A loss over ``rows`` of ``classes`` logits of type ``dtype``, computed in ``pieces``.

    ``bound`` and ``typical`` follow from the number of terms and their precision; nothing is measured.
    """

    pieces: int
    rows: int
    classes: int
    dtype: str

    @property
    def bound(self) -> float:
        """The largest difference between sums of the same terms in two orders, relative to the sum of their magnitudes.
        It holds for sums over rows: the loss, and the gradients of weight and bias.

        It is twice n u for n terms with unit roundoff u (Higham, Accuracy and Stability of Numerical Algorithms, 2nd
        ed., 4.2). Types of 16 bits are added in float32, and rounded once in eager but once per piece here.
        """
        return self._apart(roundings=float)

    @property
    def typical(self) -> float:
        """As ``bound`` for random rounding errors: with the square root of n in place of n (Higham, Mary, A New
        Approach to Probabilistic Rounding Error Analysis, 2019)."""
        return self._apart(roundings=math.sqrt)

    def _apart(self, roundings: Callable[[float], float]) -> float:
        """``roundings(n)``: the difference after n roundings, in units of roundoff."""
        unit, single, added = _UNIT_ROUNDOFF[self.dtype], _UNIT_ROUNDOFF["float32"], 2 * roundings(self.rows)
        return roundings(self.pieces + 1) * unit + added * single if unit > single else added * unit

    def __str__(self) -> str:
        return (
            f"in {self.pieces} pieces: sums over {self.rows} rows are in another order than eager's, typically within "
            f"{self.typical:.1e} of their terms, at most {self.bound:.1e}"
        )


def chunked_losses(graph: Graph) -> tuple[ChunkedLoss, ...]:
    """The losses in pieces, in the order of computation."""
    found: list[ChunkedLoss] = []
    for op in graph.ops[: graph.forward_ops]:
        piece = _PIECE.match(op.name)
        if piece is None:
            continue
        number, count, logits = int(piece[1]), int(piece[2]), graph.values[op.outputs[0]]
        if number == 1:
            found.append(ChunkedLoss(count, 0, logits.shape[1], logits.dtype))
        found[-1] = found[-1]._replace(rows=found[-1].rows + logits.shape[0])
    return tuple(found)
