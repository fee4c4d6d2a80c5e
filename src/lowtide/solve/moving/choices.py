"""What may move in a search that has no clock, and at which price.

Storages may move if computing them takes at least *ratio* times as long as their transfer; others may be computed
again. Of those that may move, the first ones made are taken (their copies are complete before memory is full), as long
as transfers take at most *limit* times the program's time in all. Each has a price: a *share* of the time of its
transfer back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Choice(NamedTuple):
    """See the module's docstring."""

    ratio: float
    share: float
    limit: float = float("inf")


QUICK = (Choice(0.0, 0.02), Choice(0.3, 0.02), Choice(1.0, 0.3), Choice(0.1, 0.003, 0.3))  # to begin with
LADDER = (
    *(Choice(ratio, ratio * part) for ratio in (0.1, 0.3, 1.0) for part in (1.0, 0.2)),
    *(Choice(ratio, 0.03 * ratio, limit) for ratio in (0.1, 0.4) for limit in (0.15, 0.3, 0.5)),
)
SHORT = (LADDER[0], LADDER[2], LADDER[3], *LADDER[-2:])


def around(choices: Iterable[Choice], step: float) -> Iterator[Choice]:
    """Choices next to these."""
    for choice in choices:
        yield choice._replace(ratio=choice.ratio * step if choice.ratio else 0.05)
        yield choice._replace(ratio=choice.ratio / step)
        yield choice._replace(share=choice.share * step)
        yield choice._replace(share=choice.share / step)
        limited = choice.limit < float("inf")
        yield choice._replace(limit=choice.limit * step if limited else 1.0)
        yield choice._replace(limit=choice.limit / step if limited else 0.5)
