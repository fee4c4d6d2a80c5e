"""What the block programs run most, compiled: one block's backward sequence, its measures, a line of ever smaller saved sets.

A block owns the forward nodes ``low .. high - 1`` and the backward nodes ``first .. last - 1``. An option of it is a
list of codes: its backward nodes in order with recomputes ``~x`` of its forward nodes between them. What the option
saves from the forward pass follows: whatever the codes read before they recompute it. Bytes here count the storages of
the block's own forward nodes; what else is there is in ``before`` and ``during`` (see ``lowtide.solve.blocks.chain``).
"""

from __future__ import annotations

from typing import NamedTuple

from lowtide.native import core
from lowtide.solve.model.compact import CompactGraph, Flags, Indices, Numbers


class BlockSpan(NamedTuple):
    """A block: its nodes, the storages that count, those that later blocks read, those that later regions read."""

    low: int
    high: int
    first: int
    last: int
    counted: Flags  # storage
    leaves: Flags  # storage: read by a later block's forward or backward nodes
    late: Flags  # storage: read by a backward node after ``last``
    before: Numbers  # node -> bytes of other storages right before it, in the backward pass
    during: Numbers  # node -> the same while it runs, its results and workspace included


class Measures(NamedTuple):
    """``saved_bytes`` includes what leaves the block; ``rerun_ns`` is the part of the forward that the option needs
    when nothing is to leave, ``extra_ns`` the recomputes among its codes."""

    saved_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    rerun_ns: int
    extra_ns: int


lazy_codes = core.lazy_codes
shrinking_sets = core.shrinking_sets


def measure_option(model: CompactGraph, span: BlockSpan, codes: Indices) -> Measures:
    """Walks the codes, then the block's forward nodes, backwards."""
    return Measures(*core.measure_option(model, span, codes))
