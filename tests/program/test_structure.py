"""Taking nested arguments apart into tensors and what holds them, and putting them together again."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from lowtide.objects.keys import fingerprint
from lowtide.objects.structure import Slot, flatten, unflatten


def test_an_object_that_many_ways_lead_to_is_looked_at_once() -> None:
    """Two ways to the next one, sixty times: more ways than there is time for."""
    first: Any = None
    for _ in range(60):
        first = SimpleNamespace(left=first, right=[first])
    assert flatten((first, 3.0))[0] == []


def test_what_leads_to_a_tensor_by_a_circle() -> None:
    """Neither of two objects that know each other is taken for one without tensors, in whatever order they come."""
    held = torch.ones(2)
    owner, part = SimpleNamespace(tensor=held), SimpleNamespace(name="part")
    owner.part, part.owner = part, owner
    for tree in ([owner, part], [part, owner]):
        tensors, structure = flatten(tree)
        assert [id(tensor) for tensor in tensors] == [id(held)] * 2
        found = {tuple(vars(one)): one for one in unflatten(structure, [held + 1, held + 2])}
        assert found["tensor", "part"].tensor.sum() + found["name", "owner"].owner.tensor.sum() == 10
        assert owner.tensor is held and part.owner is owner


def test_objects_without_tensors_are_kept_as_they_are() -> None:
    bare = SimpleNamespace(number=1)
    tensors, structure = flatten({"bare": bare, "also": SimpleNamespace(bare=bare, tensor=torch.ones(1))})
    assert len(tensors) == 1
    assert structure.leaves[0] is bare
    assert structure.leaves[1].attributes["bare"] is bare
    assert structure.leaves[1].attributes["tensor"] == Slot(0)


def test_a_container_that_is_in_itself() -> None:
    tensor = torch.ones(2)
    held: list[Any] = [tensor]
    held.append(held)
    tensors, structure = flatten({"a": held})
    assert tensors == [tensor]
    assert unflatten(structure, [3])["a"] == [3, held]


def test_containers_of_every_kind_come_back_as_they_were() -> None:
    one, two = torch.ones(1), torch.zeros(1)
    trees: list[Any] = [
        (), [], {}, (one,), [one, [two]], {"b": one, "a": two}, {1: one, "x": [two]}, {True: one}, {1: one},
        OrderedDict(b=one, a=(two,)), torch.ones(2, 2).max(1), ((one, {"a": None}), {"a": 1}),
    ]  # fmt: skip
    for tree in trees:
        tensors, structure = flatten(tree)
        again = unflatten(structure, tensors)
        leaves, spec = pytree.tree_flatten(again)
        expected, expected_spec = pytree.tree_flatten(tree)
        assert type(again) is type(tree) and repr(spec) == repr(expected_spec)
        assert [*map(id, leaves)] == [*map(id, expected)]
    kinds = [fingerprint(flatten(tree)[1]) for tree in trees]
    assert len({repr(kind) for kind in kinds}) == len(trees)
