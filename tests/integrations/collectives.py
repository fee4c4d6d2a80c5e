"""A recorder of what processes tell each other: PyTorch's own for collectives, which notes each that a group begins, whoever
began it, and one for what a process sends to another, which PyTorch's does not note over gloo."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace_json
from torch.distributed import distributed_c10d

_MOST = 50_000  # that the recorder keeps
_BOTH = ("input_sizes", "output_sizes")
_SIZES = {  # that all ranks have in common, where these are not both
    "gloo:all_to_all": (),  # they may depend on data
    "gloo:scatter": ("output_sizes",),  # one rank has the others
    "gloo:gather": ("input_sizes",),
}


class Collective(NamedTuple):
    """``group``: its name, by which its ranks know it; ``kind``: the same of all groups of a dimension of a mesh."""

    group: str
    kind: str
    what: str


Moved = tuple[str, int, tuple[int, ...]]
"""``isend`` or ``irecv``, the other rank, and the sizes."""


def record() -> None:
    """From the first process group on, collectives are noted."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = str(_MOST)


def noted() -> list[Collective]:
    """What this rank has begun so far, in its order, with the sizes of what moves."""
    entries = json.loads(_dump_fr_trace_json()).get("entries", ())
    assert len(entries) < _MOST, "the recorder is full"
    found = []
    for entry in entries:
        name = entry["profiling_name"]
        sizes = [entry[which] for which in _SIZES.get(name, _BOTH)]
        found.append(Collective(*entry["process_group"], " ".join(map(str, (name, *sizes)))))
    return found


def assert_one_order(since: int) -> int:
    """That the ranks of each group have begun the same collectives in the same order, from number ``since`` on; how many this
    rank did."""
    found: dict[str, list[str]] = {}
    own = noted()[since:]
    for one in own:
        found.setdefault(one.group, []).append(one.what)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    assert len(noted()) > since + len(own), "nothing is recorded"
    for group, order in found.items():
        for rank, other in enumerate(everyone):
            pairs = itertools.zip_longest(order, other.get(group, order))
            differing = next(((number, *pair) for number, pair in enumerate(pairs) if len(set(pair)) > 1), None)
            assert differing is None, f"group {group}, ranks {dist.get_rank()} and {rank}: {differing}"
    return len(own)


@contextlib.contextmanager
def recorded() -> Iterator[list[str]]:
    """What collectives run inside, in their order, with the sizes of what they move; equal on all ranks, over all groups, or
    this fails."""
    found: list[str] = []
    before = len(noted())
    yield found
    found += [f"{one.kind} {one.what}" for one in noted()[before:]]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    assert all(each == found for each in everyone), everyone


@contextlib.contextmanager
def sent_and_received() -> Iterator[list[Moved]]:
    """What this rank sends to others and receives from them inside, in its order, with whom, and the sizes. Each rank receives
    what the other has sent, in that order, or this fails."""
    found: list[Moved] = []

    def noting(name: str, original: Callable[..., Any], partner: str) -> Callable[..., Any]:
        def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            # Not what tells its sizes beforehand, nor the number that a pipeline sets up its connections with.
            if tensor.is_floating_point() and tensor.numel() > 1:
                group = kwargs.get("group") or dist.group.WORLD
                found.append((name, dist.get_global_rank(group, kwargs[partner]), tuple(tensor.shape)))
            return original(tensor, *args, **kwargs)

        return call

    both = {
        "isend": noting("isend", dist.isend, "group_dst"),
        "irecv": noting("irecv", dist.irecv, "group_src"),
    }
    with mock.patch.multiple(dist, **both), mock.patch.multiple(distributed_c10d, **both):
        yield found
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    rank = dist.get_rank()
    for other, theirs in enumerate(everyone):
        received = [sizes for name, partner, sizes in found if (name, partner) == ("irecv", other)]
        assert received == [sizes for name, partner, sizes in theirs if (name, partner) == ("isend", rank)], other
