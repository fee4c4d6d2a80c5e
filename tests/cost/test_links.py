"""Collectives on paper: formulas against rounds of messages, the table of links, and what programs are charged."""

from __future__ import annotations

import pytest
import torch
import torch.distributed._functional_collectives

from lowtide.cost import analytical_costs
from lowtide.cost.devices import DEVICES
from lowtide.cost.links import KINDS, LINKS, Link, collective_ns, get_link
from lowtide.errors import CostError
from lowtide.program.distributed.collectives import waited
from tests.cost.programs import program_of

_GIGABYTE = Link("test", 1e9, 100, 1.0)  # a byte takes a nanosecond
_BEGIN = collective_ns("send", 0, 2, _GIGABYTE) - 100


def _ring(ranks: int, size: int) -> tuple[int, int]:
    """Steps and bytes until every rank has every part, when each passes on to the next what it was given last."""
    has = [{rank} for rank in range(ranks)]
    passing = list(range(ranks))
    steps = sent = 0
    while any(len(parts) < ranks for parts in has):
        passing = [passing[rank - 1] for rank in range(ranks)]
        for rank, part in enumerate(passing):
            has[rank].add(part)
        steps, sent = steps + 1, sent + size // ranks
    return steps, sent


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_formulas_are_those_of_rings(ranks: int) -> None:
    size = 1000 * ranks
    steps, sent = _ring(ranks, size)
    once = _BEGIN + 100 * steps + sent
    assert collective_ns("all_gather", size, ranks, _GIGABYTE) == once
    assert collective_ns("reduce_scatter", size, ranks, _GIGABYTE) == once
    assert collective_ns("all_to_all", size, ranks, _GIGABYTE) == once
    assert collective_ns("all_reduce", size, ranks, _GIGABYTE) == 2 * once - _BEGIN
    assert collective_ns("broadcast", size, ranks, _GIGABYTE) == _BEGIN + 100 * (ranks - 1) + size
    assert collective_ns("send", size, ranks, _GIGABYTE) == collective_ns("recv", size, ranks, _GIGABYTE)


@pytest.mark.parametrize("kind", KINDS)
def test_alone_nothing_is_sent_and_more_bytes_take_longer(kind: str) -> None:
    for link in LINKS.values():
        assert collective_ns(kind, 10**6, 1, link) == 0
        assert 0 < collective_ns(kind, 10**6, 4, link) < collective_ns(kind, 10**8, 4, link)


def test_the_table() -> None:
    assert get_link("nvlink4").bandwidth == 450e9
    assert get_link("infiniband-ndr").bandwidth == 50e9
    assert all(device.ranks in LINKS for device in DEVICES.values())
    with pytest.raises(CostError, match="known are nvlink5"):
        get_link("string")
    with pytest.raises(CostError, match="collective 'gossip' is unknown"):
        collective_ns("gossip", 1, 2, _GIGABYTE)


def test_captured_collectives_are_charged_by_their_group() -> None:
    ops = torch.ops._c10d_functional
    x = torch.empty(1024, 256, device="meta", dtype=torch.bfloat16)
    whole, part = (torch.empty(rows, 256, device="meta", dtype=torch.bfloat16) for rows in (8 * 1024, 128))
    program = program_of(
        ("g", waited(ops.all_gather_into_tensor.default), ("x", 8, "unknown"), None, whole),
        ("s", waited(ops.reduce_scatter_tensor.default), ("x", "sum", 8, "unknown"), None, part),
        ("t", waited(ops.all_to_all_single.default), ("x", [256] * 4, [256] * 4, "unknown"), None, torch.empty_like(x)),
        ("r", waited(ops.all_reduce.default), ("x", "sum", "unknown"), None, torch.empty_like(x)),
        x=x,
    )
    link, size = get_link("nvlink4"), 2 * 1024 * 256
    assert analytical_costs(program, "h100").time_ns.tolist() == [
        collective_ns("all_gather", 8 * size, 8, link),
        collective_ns("reduce_scatter", size, 8, link),
        collective_ns("all_to_all", size, 4, link),
        collective_ns("all_reduce", size, 2, link),  # of a group that is not known here
    ]
