"""Following quick plans from budgets with room down to one without.

Near the least budget little fits, and what fits is far from what is quick: a search that only swings about that budget stays
near the slow plan that it came in by. A plan within a somewhat larger budget is quick, and what it lacks for a little less is
mostly a few more recomputes. So the budget comes down in steps, and every run begins where the step before ended. Where a run
does not come down, the step is halved. Where steps have become small, runs give up time for bytes (``Portfolio.lower``).

Which way a plan comes down is a matter of luck, so several lines go their ways apart from each other. Deterministic: a line
has a fixed number of runs at most, whatever the clock says.
"""

from __future__ import annotations

import itertools

from lowtide.solve.model.sweep import Candidate
from lowtide.solve.search.portfolio import AnnealRun, Portfolio
from lowtide.solve.threads import in_threads

_FIRST = 1.3  # times the budget: where the steps begin; where nothing comes down to that, as many times more
_STEP, _LEAST_STEP = 0.035, 0.004  # parts of the budget by which it comes down
_RUNS = 20  # of a line, at most
_LINES, _LARGE_LINES, _LARGE_NODES = 4, 2, 800  # lines, and those above so many nodes
_HOT, _WARM = 2.0, 0.1  # first temperatures of the first run and of the others, in mean node times
_LOWER_HEATS = (0.1, 1.0, 3.0)  # where steps have become small
_FIRST_STREAM, _STREAMS = 780, 32  # of random numbers, and how many a line may take


def tightened(portfolio: Portfolio, budget_bytes: int, iterations: int) -> list[Candidate]:
    """What quick plans within larger budgets have become once they are down to this one; of those lines that come down.
    ``iterations``: of a run."""

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
