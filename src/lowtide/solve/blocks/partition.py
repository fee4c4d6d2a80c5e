"""Where to cut the forward pass into blocks: articulation points modulo long-lived storages, and any graph evenly.

A storage that lives over more than a share of the forward pass is *long-lived*: a mask, a position table, the encoder's
output, a long skip. It is left out of the test for articulation points where its kind is cheap, so that it does not
destroy the cutting; the chain still counts it wherever it crosses.
"""

from __future__ import annotations

import numpy as np

from lowtide.solve.model.compact import CompactGraph
from lowtide.solve.model.structure import articulation_points, crossing_bytes, even_cuts, last_forward_use

_LONG_SHARE = 0.25
_CHEAP_SHARE = 0.1


def articulation_cuts(model: CompactGraph, most_blocks: int) -> list[int]:
    """Cuts ``0 .. boundary`` behind nodes whose storages alone cross, long-lived cheap storages apart. Where that gives
    more than ``most_blocks`` blocks, the cuts that leave the quickest pair are dropped."""
    last = last_forward_use(model, updates=False)
    forward = (model.storage_node < model.boundary) & ~model.held & model.recomputable[model.storage_node]
    span = last - model.storage_node
    total = int(model.storage_bytes[forward].sum())
    long_lived = forward & (span > max(_LONG_SHARE * model.boundary, 32))
    ranked = sorted(np.flatnonzero(long_lived), key=lambda s: (int(model.storage_bytes[s]), int(s)))
    spent = 0
    for storage in ranked:
        spent += int(model.storage_bytes[storage])
        long_lived[storage] = spent <= _CHEAP_SHARE * total
    cuts = [node + 1 for node in articulation_points(model, ~forward | long_lived) if node + 1 < model.boundary]
    return merged_cuts(model, [0, *cuts, model.boundary], most_blocks)


def merged_cuts(model: CompactGraph, cuts: list[int], most_blocks: int) -> list[int]:
    """At most ``most_blocks`` blocks: the cut between the two quickest neighbours goes first."""
    elapsed = np.concatenate([[0], np.cumsum(np.maximum(model.time_ns[: model.boundary], 1))])
    cuts = list(cuts)
    while len(cuts) - 1 > max(most_blocks, 1):
        pairs = [elapsed[cuts[i + 1]] - elapsed[cuts[i - 1]] for i in range(1, len(cuts) - 1)]
        del cuts[1 + int(np.argmin(pairs))]
    return cuts


def refined_cuts(model: CompactGraph, cuts: list[int], most_nodes: int) -> list[int]:
    """Every block of more than ``most_nodes`` nodes cut again where fewest bytes cross its middle half, recursively."""
    crossing = crossing_bytes(model)
    done: list[int] = [0]
    waiting = list(zip(cuts[:-1], cuts[1:], strict=True))[::-1]
    while waiting:
        low, high = waiting.pop()
        size = high - low
        if size <= most_nodes:
            done.append(high)
            continue
        begin, end = low + max(size // 4, 1), high - max(size // 4, 1)
        middle = begin + int(np.argmin(crossing[begin : max(end, begin + 1)]))
        waiting += [(middle, high), (low, middle)]
    return done


def several_cuts(model: CompactGraph, most_blocks: int) -> list[list[int]]:
    """Articulation cuts for ``most_blocks`` blocks and ever half as many down to about six, each way once. Fine blocks
    cannot leave out what crosses between two of them, coarse blocks have fewer places to store: which does better
    depends on the program."""
    counts = [most_blocks]
    while counts[-1] >= 12:
        counts.append(counts[-1] // 2)
    return distinct([articulation_cuts(model, count) for count in counts])


def distinct(ways: list[list[int]]) -> list[list[int]]:
    """Each way to cut once."""
    return [cuts for index, cuts in enumerate(ways) if cuts not in ways[:index]]


def top_cuts(model: CompactGraph, bundles: int, least_nodes: int) -> list[list[int]]:
    """Ways to cut any graph into about ``bundles`` or half as many bundles, at articulation points and evenly."""
    ways: list[list[int]] = []
    for count in (bundles, max(bundles // 2, 1)):
        most_nodes = max(2 * model.boundary // count, least_nodes)
        ways += [refined_cuts(model, articulation_cuts(model, count), most_nodes), even_cuts(model, count)]
    return distinct(ways)
