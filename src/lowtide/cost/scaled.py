"""Costs of a program at new sizes, from measured costs of the same operators at other sizes.

Bytes are measured: every distinct operator runs once. Measuring times would take many times as long, so they are
interpolated: on the line through an operator's times at two measured sizes, as a function of the roofline model's time
(``analytical``), or in proportion to that time if only one size is known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lowtide.cost.analytical import analytical_costs
from lowtide.cost.measured import measure_bytes
from lowtide.ir import Costs
from lowtide.program.program import Program

Numbers = npt.NDArray[np.int64]


class Measured(NamedTuple):
    """A program of the family with measured costs, and the times of its operators by the roofline model."""

    costs: Costs
    modelled_ns: Numbers

    @classmethod
    def of(cls, program: Program, costs: Costs) -> Measured:
        return cls(costs, analytical_costs(program).time_ns)


def scaled_costs(program: Program, known: Sequence[Measured]) -> Costs:
    """Costs of ``program``, from those of the ``known`` programs with the same operators at other sizes."""
    modelled_ns = analytical_costs(program).time_ns
    near = sorted(known, key=lambda one: abs(int(one.modelled_ns.sum()) - int(modelled_ns.sum())))
    one, other = near[0], near[1] if len(near) > 1 else near[0]
    return dataclasses.replace(measure_bytes(program, one.costs), time_ns=_on_line(modelled_ns, one, other))


def _on_line(modelled_ns: Numbers, one: Measured, other: Measured) -> Numbers:
    """Times at ``modelled_ns`` on the lines through two measured sizes. In proportion to the nearer size if modelled
    times are equal, or if times fall as they grow."""
    share = modelled_ns / np.maximum(one.modelled_ns, 1)
    proportional = one.costs.time_ns * share
    run, rise = other.modelled_ns - one.modelled_ns, other.costs.time_ns - one.costs.time_ns
    with np.errstate(divide="ignore", invalid="ignore"):
        line = one.costs.time_ns + (modelled_ns - one.modelled_ns) * (rise / run)
    rising = (run != 0) & (rise * np.sign(run) > 0) & (line > 0)
    return np.maximum(np.where(rising, line, proportional), 0).astype(np.int64)
