"""Losses that a program computes in pieces, as its graph tells: how many pieces, and how far sums may be from eager's."""

from __future__ import annotations

import re
from typing import NamedTuple

from lowtide.ir import Graph

_PIECE = re.compile(r"logits_piece_(\d+)_of_(\d+)")  # as capture.convert.chunked_loss calls them
_UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


class ChunkedLoss(NamedTuple):
    """A loss over ``rows`` of ``classes`` logits of type ``dtype`` that is computed in ``pieces``."""

    pieces: int
    rows: int
    classes: int
    dtype: str

    @property
    def deviation(self) -> float:
        """A bound, not a measurement: how far the same terms added up in two orders can be apart, as a share of the sum of
        their magnitudes. It is for what is added over rows: the loss, and the gradients of weight and bias.

        Twice n u for n terms with unit roundoff u (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., 4.2). Types
        of 16 bits are added up in float32, and rounded in eager once, in pieces once for each.
        """
        unit = _UNIT_ROUNDOFF[self.dtype]
        if unit > _UNIT_ROUNDOFF["float32"]:
            return (self.pieces + 1) * unit + 2 * self.rows * _UNIT_ROUNDOFF["float32"]
        return 2 * self.rows * unit

    def __str__(self) -> str:
        return (
            f"in {self.pieces} pieces: sums over {self.rows} rows are in another order than eager's, at most "
            f"{self.deviation:.1e} of their terms apart (a bound)"
        )


def chunked_losses(graph: Graph) -> tuple[ChunkedLoss, ...]:
    """The losses in pieces, in the order in which they are computed."""
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
