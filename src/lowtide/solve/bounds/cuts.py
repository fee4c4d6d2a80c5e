"""Which instants to look at: cuts are added one at a time, the one whose relaxation proves most.

Instants are tried where most would be live without recomputation, one in each of some equal stretches of the part that
is over the budget, then around the best of them. A cut more never makes the relaxation weaker.

The multipliers of one relaxation are where that with one more cut starts. Rows and columns are matched by what they stand for.
A gap that the new cut splits becomes a window of two gaps; the rows that link it to its gaps then take over the time of its
recomputes, so that the bound is about the same at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lowtide.solve.bounds.dual import Dual, improve, no_dual
from lowtide.solve.bounds.liveness import Liveness
from lowtide.solve.bounds.relaxation import Covering, Floats, IndexBlock, Windows, all_windows, relax
from lowtide.solve.model.compact import Numbers

_WORTH = 2e-5  # a further cut must add this share of the program's time
_LEAST, _MOST = 240, 40_000  # iterations
_AROUND = 6  # instants tried on either side of the best


@dataclass(frozen=True, slots=True)
class Trials:
    """How much work goes into the choice."""

    candidates: int  # instants tried per cut
    screening: int  # iterations x entries of the program per trial
    cuts: int
    final: int  # iterations x entries on the chosen cuts


@dataclass(frozen=True, slots=True, eq=False)
class Relaxed:
    program: Covering
    dual: Dual


def choose_cuts(facts: Liveness, kept_bytes: Numbers, trials: Trials, enough: float) -> Relaxed | None:
    """The relaxation on the chosen cuts, with its multipliers; ``None`` where no instant is over the budget.
    ``kept_bytes``: bytes resident at each instant without recomputation. Stops early once the bound is ``enough``."""
    over = np.nonzero(kept_bytes[:-1] > facts.room_bytes)[0]
    best: Relaxed | None = None
    for _ in range(trials.cuts):
        stretches = _stretches(over, trials.candidates)
        found = _best_trial(facts, best, [_highest(stretch, kept_bytes) for stretch in stretches], trials)
        if found is None:
            break
        home = next(index for index, stretch in enumerate(stretches) if stretch[0] <= found[0] <= stretch[-1])
        near = _stretches(np.concatenate(stretches[max(home - 1, 0) : home + 2]), 2 * _AROUND)
        around = _best_trial(facts, best, [_highest(stretch, kept_bytes) for stretch in near], trials)
        candidate = max((entry[1] for entry in (found, around) if entry is not None), key=lambda one: one.dual.bound)
        if best is not None and candidate.dual.bound < best.dual.bound + _WORTH:
            break
        best = _more(candidate, trials.final // 4)
        if best.dual.bound >= enough:
            return best
    return None if best is None else _more(best, trials.final)


def _best_trial(
    facts: Liveness, known: Relaxed | None, instants: Sequence[int], trials: Trials
) -> tuple[int, Relaxed] | None:
    """The instant that proves most when added to the known cuts."""
    cuts = () if known is None else known.program.cuts
    found = [
        (instant, _with_cut(facts, known, instant, trials.screening)) for instant in sorted(set(instants) - set(cuts))
    ]
    return max(found, key=lambda entry: entry[1].dual.bound, default=None)


def _with_cut(facts: Liveness, known: Relaxed | None, instant: int, work: int) -> Relaxed:
    cuts = sorted((*(known.program.cuts if known else ()), instant))
    return on_windows(facts, known, all_windows(cuts, facts.model.nodes), work)


def on_windows(facts: Liveness, known: Relaxed | None, windows: Windows, work: int, most: int = _MOST) -> Relaxed:
    """The relaxation for these windows, its multipliers begun at the known ones and improved with ``work`` iterations x
    entries, at most ``most`` iterations."""
    program = relax(facts, windows)
    if known is None:
        return _more(Relaxed(program, no_dual(program)), work)
    cost: Floats = facts.model.time_ns / max(int(facts.model.time_ns.sum()), 1)
    return _more(Relaxed(program, _transfer(known.program, known.dual, program, cost)), work, most)


def _more(relaxed: Relaxed, work: int, most: int = _MOST) -> Relaxed:
    iterations = min(max(work // max(len(relaxed.program.index), 1), _LEAST), most)
    return Relaxed(relaxed.program, improve(relaxed.program, relaxed.dual, iterations))


def _stretches(instants: Numbers, count: int) -> list[Numbers]:
    return [part for part in np.array_split(instants, max(min(count, len(instants)), 1)) if len(part)]


def _highest(stretch: Numbers, kept_bytes: Numbers) -> int:
    return int(stretch[np.argmax(kept_bytes[stretch])])


def _transfer(old: Covering, dual: Dual, new: Covering, cost: Floats) -> Dual:
    """A start for ``new``; ``cost`` is the share of time of each node."""
    x = _match(old.column_blocks, dual.x, new.column_blocks, len(new.cost))
    y = _match(old.row_blocks, dual.y, new.row_blocks, len(new.right))
    old_links = [block for block in old.row_blocks if block.key[0] == "link"]
    for block in new.row_blocks:
        split = (block.key[1], block.key[2])
        if block.key[0] != "link" or split not in old.windows or old.windows[split]:
            continue  # not a gap until now
        left = cost.copy()
        for link in old_links:
            whole = (link.key[1], link.key[2])
            if split in old.windows[whole] and split not in new.windows[whole]:
                left[link.members] -= dual.y[link.first : link.first + len(link.members)]
        y[block.first : block.first + len(block.members)] = np.maximum(left[block.members], 0.0)
    return Dual(dual.bound, x, y)


def _match(old: tuple[IndexBlock, ...], values: Floats, new: tuple[IndexBlock, ...], size: int) -> Floats:
    """The values of the members that both have, 0 elsewhere."""
    known = {block.key: block for block in old}
    out = np.zeros(size)
    for block in new:
        before = known.get(block.key)
        if before is None or len(before.members) == 0 or len(block.members) == 0:
            continue
        at = np.minimum(np.searchsorted(before.members, block.members), len(before.members) - 1)
        same = before.members[at] == block.members
        out[block.first : block.first + len(block.members)][same] = values[before.first + at[same]]
    return out
