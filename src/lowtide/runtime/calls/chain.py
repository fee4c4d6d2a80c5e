"""What the autograd nodes of a planned call return, and after which gradient groups."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import MutableMapping, Sequence

import torch

from lowtide.lower import Lowered

# What a node returns: flat inputs, each with the number of a term of its gradient.
Node = tuple[tuple[int, int], ...]
_SPARE_TERMS = 6  # extra terms per gradient, in case a program for other gradients has more


def nodes_of(lowered: Lowered, linked: tuple[bool, ...], terms_from: int | None, in_order: bool) -> tuple[Node, ...]:
    """What each node returns. A node returns the terms of its gradient group, or with ``in_order`` one term, in eager's
    order. Inputs that are ``linked`` (require a gradient) also get places for further terms, with their last term or at
    the end. From the flat input ``terms_from`` on, gradients leave as terms of their sums."""
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
    """How many gradient groups must have run before each node returns."""
    if nodes not in lowered.chains:
        last = _last(nodes)
        made: Counter[tuple[int, int]] = Counter()  # groups needed for a term and what is added to it
        for place, group in enumerate(lowered.gradient_groups, 1):
            for position, number in (lowered.terms[index] for index in group.gradients):
                made[position, min(number, last.get(position, number))] = place
        places = [max((made[term] for term in each), default=0) for each in nodes]
        lowered.chains[nodes] = [*itertools.accumulate(places[:-1], max), len(lowered.gradient_groups)]
    found: Sequence[int] = lowered.chains[nodes]
    return found


def add_left_terms(gradients: MutableMapping[tuple[int, int], torch.Tensor], nodes: Sequence[Node], node: int) -> None:
    """Add terms that no node has a place for (in a program for other gradients) to the last place for this input, if it
    is one of this node's."""
    last, own = _last(nodes), set(nodes[node])
    for position, number in sorted(gradients):
        place = position, last.get(position, number)
        if number > place[1] and place in own:
            added = gradients.pop((position, number))
            gradients[place] = gradients[place] + added if place in gradients else added


def _last(nodes: Sequence[Node]) -> dict[int, int]:
    """The last term number that has a place, by flat input."""
    return dict(sorted(term for each in nodes for term in each))
