"""What the nodes of autograd that drive a planned call return, and after which gradients."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

from lowtide.lower import Lowered

# What a node returns: flat inputs, each with the number of a term of its gradient.
Node = tuple[tuple[int, int], ...]
_SPARE_TERMS = 6  # of a gradient, where a program for other gradients has more of them than the one that ran forward


def nodes_of(lowered: Lowered, linked: tuple[bool, ...], terms_from: int | None, in_order: bool) -> tuple[Node, ...]:
    """What each node returns: the terms of its group or, ``in_order``, one after the other, as in eager; and whatever else may
    come for inputs that are ``linked``, since they require a gradient, with their last term or at the end. Gradients leave as
    terms of their sums from the flat input ``terms_from`` on."""
    asked = linked, terms_from, in_order
    if asked not in lowered.chains:
        lowered.chains[asked] = _nodes(lowered, *asked)
    found: tuple[Node, ...] = lowered.chains[asked]
    return found


def _nodes(lowered: Lowered, linked: Sequence[bool], terms_from: int | None, in_order: bool) -> tuple[Node, ...]:
    places = [group.gradients for group in lowered.gradient_groups]
    places = [(index,) for index in range(len(lowered.terms))] if in_order else places
    groups = [[lowered.terms[index] for index in each] for each in places] or [[]]
    last = {position: group for group in groups for position, _ in group}
    terms = Counter(position for position, _ in lowered.terms)
    sums = dict(lowered.program.sums)
    for position in itertools.compress(range(len(linked)), linked):
        if position not in lowered.program.unlinked:
            in_terms = terms_from is not None and position >= terms_from
            most = terms[position] + _SPARE_TERMS if in_terms else sums.get(position, 1)
            last.get(position, groups[-1]).extend((position, number) for number in range(terms[position], most))
    return tuple(map(tuple, groups))


def ends_of(lowered: Lowered, nodes: tuple[Node, ...]) -> Sequence[int]:
    """How many groups of gradients must have run for each node."""
    if nodes not in lowered.chains:
        made = {lowered.terms[i]: place for place, group in enumerate(lowered.gradient_groups) for i in group.gradients}
        places = [max((made[term] + 1 for term in each if term in made), default=0) for each in nodes]
        lowered.chains[nodes] = [*itertools.accumulate(places[:-1], max), len(lowered.gradient_groups)]
    found: Sequence[int] = lowered.chains[nodes]
    return found
