"""Tighten quick plans: follow them from a larger budget down to the real one.

Near the least budget few sequences fit, and those are far from quick ones: a search that only oscillates about that budget
stays near the slow plan by which it entered. A plan within a somewhat larger budget is quick, and mostly needs only a few
more recomputes for a slightly smaller budget. So the budget is lowered in steps, and every run starts from the result of the
previous step. If a run fails, the step is halved. Once steps are small, runs trade time for bytes (``Portfolio.lower``).

Which path a plan takes down is a matter of luck, so several independent lines (series of runs) are tried. Deterministic: the
number of runs of a line is limited, whatever the clock says.
"""

from __future__ import annotations

import itertools

from lowtide.solve.model.sweep import Candidate
from lowtide.solve.search.portfolio import AnnealRun, Portfolio
from lowtide.solve.threads import in_threads

_FIRST = 1.3  # times the budget: the first one asked for; if no run meets that, as many times more
_STEP, _LEAST_STEP = 0.035, 0.004  # fractions of the budget by which the one asked for is lowered
_RUNS = 20  # of a line, at most
_LINES, _LARGE_LINES, _LARGE_NODES = 4, 2, 800  # lines; lines of programs with more than so many nodes
_HOT, _WARM = 2.0, 0.1  # first temperatures of the first run and of the others, in mean node times
_LOWER_HEATS = (0.1, 1.0, 3.0)  # once steps are small
_FIRST_STREAM, _STREAMS = 780, 32  # the first random stream, and the number of streams of a line


def tightened(portfolio: Portfolio, budget_bytes: int, iterations: int) -> list[Candidate]:
    """Tighten quick plans within larger budgets down to ``budget_bytes``. Returns the results of the lines that get there.
    ``iterations``: those of a run."""

    def line(number: int) -> list[Candidate]:
        return _line(portfolio, budget_bytes, iterations, _FIRST_STREAM + _STREAMS * number)

    lines = _LINES if portfolio.model.nodes <= _LARGE_NODES else _LARGE_LINES
    return [*itertools.chain(*in_threads(line, range(lines)))]


def _line(portfolio: Portfolio, budget_bytes: int, iterations: int, stream: int) -> list[Candidate]:
    best, come_down, step = portfolio.keep_all(), False, _STEP
    asked = int(budget_bytes * _FIRST)
    for number in range(stream, stream + _RUNS):
        run = AnnealRun(best, number, _WARM if come_down else _HOT)
        met = portfolio.round([run], asked, iterations, 0)
        if met:
            best, come_down = met[0], True
            if best.peak_bytes <= budget_bytes:
                return met
        elif come_down:
            step /= 2
        if step < _LEAST_STEP:
            break
        asked = max(best.peak_bytes - int(step * budget_bytes), budget_bytes) if come_down else int(asked * _FIRST)
    runs = [AnnealRun(best, number, heat) for number, heat in enumerate(_LOWER_HEATS, stream + _RUNS)]
    found = in_threads(lambda run: portfolio.lower(run, budget_bytes, iterations), runs)
    return [point for point in found if point.peak_bytes <= budget_bytes]
