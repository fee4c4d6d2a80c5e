"""Arenas on the device ``hosted``: started by ``test_hosted.py``, in the process of ``on_hosted.py``."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.device import Accelerator, interface_of
from lowtide.memory.allocators import meter_of, round_up
from lowtide.memory.arena import AddressTable, Arena, new_arena
from lowtide.memory.device_allocator import DeviceMemory, device_memory
from tests.device import on_hosted
from tests.device.on_hosted import CASES, FIRST, KIB, SECOND, Scaled, case, equal, perceptron, trained
from tests.support.training import QUICK
from tests.support.wide import pairs

_clean = on_hosted._clean


def memory_of(device: torch.device) -> DeviceMemory:
    found = interface_of(device)
    assert isinstance(found, Accelerator)
    memory = device_memory(found)
    assert memory is not None
    return memory


def planned(model: nn.Module, x: torch.Tensor, budget: str = "60%", **options: Any) -> nn.Module:
    options = {"planner": QUICK, "planning": "wait", "on_capture_error": "error"} | options
    return lowtide.rematerialize(model, (x,), budget=budget, arena=True, **options)


def arena_of(model: nn.Module) -> Arena:
    (arena,) = model.forward._arenas.values()
    return arena


@pytest.mark.parametrize(("name", "device"), pairs(CASES, (FIRST, SECOND)))
def test_training(name: str, device: torch.device) -> None:
    """Equal to the bit, also on a device that is not the current one; what the arena held goes with the plan."""
    model, x = case(name, device)
    memory = memory_of(device)
    assert (memory.reserved_bytes, memory.used_bytes) == (0, 0)
    budgeted = planned(copy.deepcopy(model), x)
    assert equal(trained(budgeted, x), trained(model, x))
    (plan,) = lowtide.plans(budgeted)
    assert plan.is_placed and memory.reserved_bytes == plan.layout.block_bytes
    assert memory_of(FIRST if device == SECOND else SECOND).reserved_bytes == 0
    lowtide.restore(budgeted)
    del budgeted
    gc.collect()
    assert (memory.reserved_bytes, memory.used_bytes) == (0, 0)


def test_all_that_is_planned_lies_in_the_arena() -> None:
    """The device takes what was predicted for addresses, to the byte, and what lies in the arena is what is alive."""
    model, x = case("transformer")
    budgeted = planned(model, x)
    budgeted(x).backward()
    (plan,) = lowtide.plans(budgeted)
    for _ in range(2):
        budgeted.zero_grad()
        before = arena_of(budgeted).counts
        measured = lowtide.measure(lambda: budgeted(x).backward())
        placed, *others = (now - then for now, then in zip(arena_of(budgeted).counts, before, strict=True))
        assert placed > 50 and others == [0, 0, 0]
        assert measured.peak_bytes == plan.reserved_bytes <= plan.budget_bytes
    gradients = [parameter.grad.nbytes for parameter in budgeted.parameters() if parameter.grad is not None]
    assert memory_of(FIRST).used_bytes == sum(round_up(each, FIRST) for each in gradients)
    budgeted.zero_grad()
    assert memory_of(FIRST).used_bytes == 0


def test_what_is_kept_stays() -> None:
    """Results of a call, a second call before the backward pass of the first, and gradients that somebody keeps."""
    model, x = case("transformer")
    found = []
    for one in (planned(copy.deepcopy(model), x), model):
        torch.hosted.manual_seed_all(3)
        kept = []
        for _ in range(3):
            first, second = one(x), one(2 * x)
            second.backward()
            first.backward()
            kept += [first, second, *(parameter.grad for parameter in one.parameters())]
            one.zero_grad()
        found.append([each.detach() for each in kept if each is not None])
    assert equal(*found)


def test_other_shapes() -> None:
    """One block serves them all, and grows with the largest."""
    model = perceptron().to(FIRST)
    plain, budgeted = copy.deepcopy(model), planned(model, torch.ones(192, 64, device=FIRST), "80%")
    for batch in (192, 384, 192, 256, 384):
        x = torch.randn(batch, 64, device=FIRST)
        assert equal(trained(budgeted, x, 2), trained(plain, x, 2))
    blocks = [plan.layout.block_bytes for plan in lowtide.plans(budgeted)]
    assert memory_of(FIRST).reserved_bytes == max(blocks)


def test_memory_of_the_host_has_no_place_on_the_device() -> None:
    x, weight, scale = torch.randn(64, 32, device=FIRST), torch.randn(32, 32, device=FIRST), torch.tensor(0.5)
    found = []
    for arena in (False, True):
        torch.hosted.manual_seed_all(3)
        model = lowtide.rematerialize(Scaled(), (scale, x, weight.requires_grad_()), budget="100%", arena=arena)
        for _ in range(2):
            loss, other = model(scale, x, weight)
            (loss + other).backward()
        assert weight.grad is not None
        found.append([loss.detach(), weight.grad.clone()])
        weight.grad = None
    assert equal(*found)


def test_what_a_library_keeps_finds_no_room_in_the_block() -> None:
    """Nor do other sizes than the operator's own, when it runs first."""
    arena = new_arena(FIRST)
    assert arena is not None
    table = AddressTable(arena, [([(0, 4 * KIB)], [], (4 * KIB, KIB))])
    assert table.reserve()
    memory = memory_of(FIRST)
    kept = []
    for used in (4 * KIB, 8 * KIB):
        table.begin(0)
        kept.append(torch.empty(2 * KIB, dtype=torch.uint8, device=FIRST))
        tensor = torch.empty(4 * KIB - 100, dtype=torch.uint8, device=FIRST)  # which takes up 4 KiB there
        table.end()
        assert memory.used_bytes == 4 * KIB, used
        del tensor
    assert memory.used_bytes == 0


def test_no_memory_for_a_block() -> None:
    """The next pass asks again."""
    model, x = case("transformer")
    expected = trained(copy.deepcopy(model), x)
    budgeted = planned(model, x)
    block_bytes = lowtide.plans(budgeted)[0].layout.block_bytes
    meter = meter_of(FIRST)
    assert meter is not None
    torch.ops.hosted.set_total(0, meter.level_bytes + block_bytes - 1)
    assert not arena_of(budgeted).reserve(block_bytes)
    torch.ops.hosted.set_total(0, on_hosted.TOTAL_BYTES)
    assert equal(trained(budgeted, x), expected)
    assert arena_of(budgeted).reserved_bytes == block_bytes
