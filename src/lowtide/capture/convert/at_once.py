"""Which inputs the forward pass can write as soon as the new value is computed, so that no copy of the first value is
needed.

This is possible if only the new value is computed from the first one, and only the forward pass reads the new one.
Operators that read either of them run once, since a second run would find another value. So what the backward pass
needs of them must be kept. If that takes more memory than copies would, copies are made instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import fx

from lowtide.capture.convert.builder import meta_of
from lowtide.capture.convert.nodes import ALIASES, ancestors
from lowtide.capture.convert.sparse import is_made_sparse
from lowtide.capture.trace.expected import EXPECT, READ
from lowtide.capture.trace.sizes import hint
from lowtide.program.layouts import memory_of


@dataclass(frozen=True, slots=True)
class Chain:
    """``computed``: the new value of an input. ``readers``: operators that read the input before or after, and must not
    run again."""

    computed: fx.Node
    readers: Sequence[fx.Node]


def at_once(
    written: Mapping[fx.Node, fx.Node], nodes: Sequence[fx.Node], backward: Set[fx.Node], results: Sequence[fx.Node]
) -> dict[fx.Node, Chain]:
    """The inputs of ``written`` (with their new values) that are to be written at once. ``nodes``: the forward pass,
    placeholders first."""
    if not written:
        return {}
    graph = _Forward(nodes, backward, results)
    chains = {given: chain for given, new in written.items() if (chain := graph.chain(given, new)) is not None}
    groups: dict[frozenset[int], list[fx.Node]] = {}  # by the storages that must be kept
    for given, chain in chains.items():
        groups.setdefault(graph.kept_after(chain.readers), []).append(given)
    found: dict[fx.Node, Chain] = {}
    for kept, group in groups.items():
        if sum(map(graph.bytes_of.__getitem__, kept)) <= sum(map(_bytes_of, group)):
            found.update((given, chains[given]) for given in group)
    return found


class _Forward:
    def __init__(self, nodes: Sequence[fx.Node], backward: Set[fx.Node], results: Sequence[fx.Node]) -> None:
        self.backward, self.results = backward, results
        self.place = {node: place for place, node in enumerate(nodes)}
        self.last_check = max(
            (place for node, place in self.place.items() if node.target in (EXPECT, READ)), default=-1
        )
        self.sharing: dict[int, list[fx.Node]] = {}  # nodes by storage
        self.bytes_of: dict[int, int] = {}
        for node in nodes:
            if (storage := storage_of(node)) is not None:
                self.sharing.setdefault(storage, []).append(node)
                self.bytes_of[storage] = _bytes_of(node)

    def chain(self, given: fx.Node, new: fx.Node) -> Chain | None:
        """How the ``new`` value of an input is computed, if it can be written at once."""
        computed, storage, old = _root(new), storage_of(new), storage_of(given)
        if storage is None or old is None or meta_of(computed.meta["val"]) != meta_of(given.meta["val"]):
            return None
        before, after = self.sharing[old], self.sharing[storage]
        alone = sum(node.op == "placeholder" for node in before) == 1 and after[0] is computed
        if not alone or self.place.get(computed, -1) <= self.last_check:  # a failing check makes the call begin again
            return None
        if any(node in self.results for node in after if node is not new) or self.results.count(new) != 1:
            return None
        readers = [*self._readers(before), *self._readers(after)]
        if any(node not in self.place or is_made_sparse(node) for node in readers):
            return None
        if not self._leads_only_to(given, computed):
            return None
        return Chain(computed, readers)

    def kept_after(self, readers: Sequence[fx.Node]) -> frozenset[int]:
        """The storages that must be kept for the backward pass if ``readers`` do not run again. Of all times after all
        of them have run, it is the one at which the live results that are read later take the fewest bytes; the
        latest of these, which serves more readers."""
        first, last = dict[int, int](), dict[int, int]()
        pending, seen = list(readers), set(readers)
        while pending:
            node = pending.pop()
            users = [user for user in node.users if user in self.place]
            pending += [user for user in users if user not in seen]
            seen.update(users)
            if (storage := storage_of(node)) is not None:
                ends = [len(self.place)] if any(user in self.backward for user in node.users) else []
                ends += [self.place[user] for user in users]
                first[storage] = min(self.place[node], first.get(storage, len(self.place)))
                last[storage] = max([*ends, last.get(storage, 0)])
        changes = [0] * (len(self.place) + 1)
        for storage, place in first.items():
            changes[place] += self.bytes_of[storage]
            changes[max(last[storage], place)] -= self.bytes_of[storage]
        levels = list(accumulate(changes[:-1]))
        start = max(map(self.place.__getitem__, readers), default=0)
        cut = min(reversed(range(start, len(levels))), key=levels.__getitem__)
        return frozenset(storage for storage, place in first.items() if place <= cut < last[storage])

    def _readers(self, sharing: Sequence[fx.Node]) -> list[fx.Node]:
        """The operators, other than views, that read the memory of a storage."""
        users = (user for node in sharing for user in node.users if user in self.place or user in self.backward)
        return [user for user in users if user not in sharing]

    def _leads_only_to(self, given: fx.Node, computed: fx.Node) -> bool:
        """Whether only ``computed`` is computed from the first value of an input."""
        pending, seen, way = [given], {given}, ancestors([computed])
        while pending:
            node = pending.pop()
            for user in node.users:
                counts = user in self.place or user in self.backward
                if node in self.results or (counts and user not in way):
                    return False
                if counts and user is not computed and user not in seen:
                    seen.add(user)
                    pending.append(user)
        return True


def storage_of(node: fx.Node) -> int | None:
    """A key that is equal for nodes that share memory in a program."""
    value = _root(node).meta.get("val")
    return memory_of(value) if isinstance(value, torch.Tensor) and value.layout is torch.strided else None


def _root(node: fx.Node) -> fx.Node:
    """The node that a node stands for in a program."""
    while node.target in ALIASES:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _bytes_of(node: fx.Node) -> int:
    return int(hint(node.meta["val"].untyped_storage().nbytes()))
