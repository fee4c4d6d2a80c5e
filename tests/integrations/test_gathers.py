"""What FSDP2 holds, by hand for two blocks, and of parameters that do not divide evenly."""

from __future__ import annotations

import torch
from torch import nn

from lowtide.integrations.gathers import Gathers, Unit


def _unit(nbytes: int, copied: bool = False) -> Unit:
    return Unit(nbytes, nbytes, nbytes, nbytes, nbytes // 2, copied)


def test_padding() -> None:
    parameters = [nn.Parameter(torch.zeros(3, 5)), nn.Parameter(torch.zeros(4), requires_grad=False)]
    assert Unit.of(parameters, 2) == Unit(96, 96, 60, 80, 40, True)
    assert Unit.of(parameters, 1) == Unit(0, 76, 60, 60, 60, False)
    assert Unit.of([], 2).buffer_bytes == 0


def test_a_pass_over_two_blocks() -> None:
    """Peaks of the events, and what is held between them. The root has 10 bytes, the blocks 100 each."""
    gathers = Gathers([_unit(100), _unit(100)], _unit(10))
    seen = []
    for event in (
        gathers.begin,
        lambda: gathers.enter(0, False),
        lambda: gathers.leave(0, False),
        lambda: gathers.enter(1, False),
        lambda: gathers.leave(1, False),
        gathers.turn,
        lambda: gathers.enter(1, True),
        lambda: gathers.leave(1, True),
        lambda: gathers.enter(0, True),
        lambda: gathers.leave(0, True),
        gathers.end,
    ):
        seen.append((event(), gathers.held_bytes))
    assert seen == [
        (20, 20),  # the root: buffer and parameters
        (210, 210),  # the block's buffer in the place of the root's, and its parameters
        (210, 110),
        (210, 210),  # the next buffer, then the previous one goes
        (210, 110),
        (110, 110),  # the last block is gathered ahead
        (210, 210),  # unpacked; its buffer goes, the next block's comes
        (310, 260),  # gradients beside the reduction's input, then its output
        (360, 260),  # nothing more to gather; the reduction's input stays
        (260, 210),
        (210, 115),  # the root: its gradients are reduced last
    ]


def test_copies_of_collectives_stay_until_the_next() -> None:
    gathers, plain = Gathers([_unit(100, True)], _unit(10, True)), Gathers([_unit(100)], _unit(10))
    assert (gathers.begin(), plain.begin()) == (30, 20)
    assert gathers.held_bytes == plain.held_bytes + 10
    assert gathers.enter(0, False) == plain.enter(0, False) + 100
    assert gathers.held_bytes == plain.held_bytes + 100


def test_frozen_blocks_are_gathered_and_not_reduced() -> None:
    frozen = nn.Linear(4, 4).requires_grad_(False)
    gathers = Gathers.of(nn.Sequential(frozen), [frozen], 2)
    gathers.begin()
    gathers.enter(0, False)
    gathers.leave(0, False)
    gathers.turn()
    gathers.enter(0, True)
    before = gathers.held_bytes
    gathers.leave(0, True)
    assert gathers.held_bytes == before - 80
