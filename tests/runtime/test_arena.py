"""Models whose tensors have their places in an arena: equal to eager to the bit, whatever is kept, thrown or run beside."""

from __future__ import annotations

import copy
import gc
import logging
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lowtide
from lowtide.memory import cpu_allocator
from lowtide.memory.allocators import PeakWindow, reserved_meter
from lowtide.memory.arena import AddressTable, Arena
from tests.support.training import QUICK

COUNTER = cpu_allocator.install()
pytestmark = pytest.mark.skipif(COUNTER is None, reason="this build of PyTorch takes no allocator in front of its own")
WIDTH, LENGTH = 64, 32
GENERATOR_STATE = 5056  # bytes of a copy, when a pass begins


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down, self.dropout = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.attention(self.norm(x)).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(query[:, None], key[:, None], value[:, None])[:, 0]
        return x + self.dropout(self.down(F.gelu(self.up(x))))


class _Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(4))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.reshape(x.shape[0], 8, -1, 16)).mean((2, 3))


def _transformer() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(_Block() for _ in range(4))).train()


def _convolutional() -> nn.Module:
    torch.manual_seed(0)
    return _Convolutions().train()


def _batch(seed: int, length: int = LENGTH) -> torch.Tensor:
    return torch.randn(4, length, WIDTH, generator=torch.Generator().manual_seed(seed))


def _step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(1)
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach()


def _planned(model: nn.Module, budget: str = "60%", **options: object) -> nn.Module:
    options = {"planning": "wait", "planner": "greedy"} | options
    return lowtide.rematerialize(model, (_batch(0),), budget=budget, arena=True, **options)  # type: ignore[arg-type]


def _arena(model: nn.Module) -> Arena:
    (arena,) = model.forward._arenas.values()
    return arena


def _assert_equal(model: nn.Module, plain: nn.Module) -> None:
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other), name
        assert one.grad is None or torch.equal(one.grad, other.grad), name  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [_transformer, _convolutional])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_training(make: Callable[[], nn.Module], set_to_none: bool) -> None:
    model, plain = _planned(make()), make()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (model, plain)]
    for seed in range(6):
        losses = []
        for one, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad(set_to_none=set_to_none)
            losses.append(_step(one, _batch(seed)))
            optimizer.step()
        assert torch.equal(*losses)
        _assert_equal(model, plain)


class _Loss(nn.Module):
    """With the loss inside, so that all of a step is planned."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(x).square().mean()
        return loss


@pytest.mark.parametrize("make", [_transformer, _convolutional])
def test_all_that_is_planned_lies_in_the_arena(make: Callable[[], nn.Module]) -> None:
    """From the second step on; nothing is reserved but the block and what the plan has outside of it."""
    model, x = _planned(_Loss(make())), _batch(0)
    model(x).backward()
    (plan,) = lowtide.plans(model)
    assert plan.is_placed and plan.reserved_bytes <= plan.budget_bytes
    for _ in range(2):
        model.zero_grad()
        before = _arena(model).counts
        measured = lowtide.measure(lambda: model(x).backward())
        placed, taken, crowded, unexpected = (
            now - then for now, then in zip(_arena(model).counts, before, strict=True)
        )
        assert placed > 50 and (taken, unexpected) == (0, 0)
        assert measured.peak_bytes <= plan.peak_bytes
        assert measured.reserved_bytes is not None
        if make is _transformer:
            assert crowded == 0 and measured.reserved_bytes <= plan.reserved_bytes + GENERATOR_STATE


@pytest.mark.parametrize("percent", [50, 65, 80])
def test_the_budget_is_for_addresses(percent: int) -> None:
    model = _planned(_transformer(), f"{percent}%", planner=QUICK)
    (plan,) = lowtide.plans(model)
    assert plan.peak_bytes <= plan.reserved_bytes <= plan.budget_bytes


def test_gradients_and_results_may_be_kept() -> None:
    model, plain = _planned(_transformer()), _transformer()
    kept = []
    for seed in range(4):
        for one in (model, plain):
            one.zero_grad()
            torch.manual_seed(seed)
            result = one(_batch(seed))
            result.square().mean().backward()
            kept.append((result, [parameter.grad for parameter in one.parameters()]))
    for (result, gradients), (other, others) in zip(kept[::2], kept[1::2], strict=True):
        assert torch.equal(result, other)
        assert all(map(torch.equal, gradients, others))
    lowtide.restore(model)
    assert torch.equal(kept[0][0], kept[1][0])


def test_two_passes_at_a_time_and_a_second_backward_pass() -> None:
    model, plain = _planned(_transformer()), _transformer()
    for _ in range(3):
        for one in (model, plain):
            one.zero_grad()
            torch.manual_seed(3)
            first, second = one(_batch(1)), one(_batch(2))
            first.sum().backward(retain_graph=True)
            second.square().sum().backward()
            first.square().sum().backward()
        _assert_equal(model, plain)


def test_an_error_in_the_middle_of_a_step() -> None:
    """In a hook of a gradient, while the backward program is suspended. The autograd engine keeps the graph of a failed pass
    until the next backward pass, and with it what lies in the arena; afterwards all has its place again."""
    model, plain = _planned(_transformer()), _transformer()
    _step(model, _batch(0))
    model.zero_grad()

    def fail(parameter: torch.Tensor) -> None:
        raise RuntimeError("in the middle")

    handle = next(model[2].parameters()).register_post_accumulate_grad_hook(fail)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="in the middle"):
            _step(model, _batch(1))
        model.zero_grad()
    handle.remove()
    taken = []
    for _ in range(4):
        model.zero_grad()
        plain.zero_grad()
        assert torch.equal(_step(model, _batch(2)), _step(plain, _batch(2)))
        _assert_equal(model, plain)
        gc.collect()  # the errors' tracebacks
        taken.append(_arena(model).counts[1])
    assert taken[0] > 0 and taken[-1] == taken[-2]


def test_alternating_lengths_share_one_block() -> None:
    assert COUNTER is not None
    model, plain = _planned(_transformer(), dynamic=False, planning="wait"), _transformer()
    lengths, reserved = (LENGTH, 16, 24), []
    for round_number in range(4):
        for length in lengths:
            for one in (model, plain):
                one.zero_grad()
            assert torch.equal(_step(model, _batch(length, length)), _step(plain, _batch(length, length)))
            _assert_equal(model, plain)
        model.zero_grad()
        reserved.append((COUNTER.reserved_ahead_bytes, _arena(model).reserved_bytes))
        assert round_number == 0 or reserved[-1] == reserved[-2]
    assert _arena(model).reserved_bytes == max(plan.layout.block_bytes for plan in lowtide.plans(model))


def test_two_models_in_two_threads() -> None:
    models = [_planned(_transformer()), _planned(_convolutional())]
    plains = [_transformer(), _convolutional()]
    expected = [[_step(plain, _batch(0)), *(p.grad for p in plain.parameters())] for plain in plains]
    wrong: list[int] = []

    def train(index: int) -> None:
        model = models[index]
        for _ in range(20):
            model.zero_grad()
            if index == 0:  # the other one draws nothing, and there is one generator for both
                torch.manual_seed(1)
            model(_batch(0)).square().mean().backward()
            found = [parameter.grad for parameter in model.parameters()]
            if not all(map(torch.equal, found, expected[index][1:])):
                wrong.append(index)

    threads = [threading.Thread(target=train, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_copy_has_an_arena_of_its_own() -> None:
    model = _planned(_transformer())
    _step(model, _batch(0))
    clone, plain = copy.deepcopy(model), _transformer()
    for one in (model, clone, plain):
        one.zero_grad()
        _step(one, _batch(1))
    _assert_equal(clone, plain)
    _assert_equal(model, plain)
    assert _arena(clone) is not _arena(model)


def test_the_memory_goes_with_the_model() -> None:
    assert COUNTER is not None
    gc.collect()
    before = COUNTER.reserved_ahead_bytes
    model = _planned(_transformer())
    for _ in range(2):
        _step(model, _batch(0))
    assert COUNTER.reserved_ahead_bytes > before
    model.zero_grad()
    lowtide.restore(model)
    gc.collect()
    assert COUNTER.reserved_ahead_bytes == before


def test_where_no_block_can_be_reserved_it_runs_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class NoMemory(AddressTable):  # type: ignore[misc]
        def reserve(self) -> bool:
            return False

    monkeypatch.setattr("lowtide.lower.addresses.AddressTable", NoMemory)
    with caplog.at_level(logging.WARNING):
        model, plain = _planned(_transformer()), _transformer()
        for _ in range(2):
            model.zero_grad()
            plain.zero_grad()
            assert torch.equal(_step(model, _batch(0)), _step(plain, _batch(0)))
            _assert_equal(model, plain)
    assert caplog.text.count("cannot be reserved") == 1 and _arena(model).counts == (0, 0, 0, 0)


def test_the_first_step_needs_no_second_block() -> None:
    """While it is learned which allocation is which, they lie in the block too, and results of the step as well."""
    model, x = _planned(_Loss(_transformer())), _batch(0)
    (plan,) = lowtide.plans(model)
    first = lowtide.measure(lambda: model(x).backward()).reserved_bytes
    assert first is not None and first < plan.reserved_bytes + plan.budget_bytes // 3


class _Deciding(nn.Module):
    """No single program for long batches."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = _transformer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(x)
        return x * 2 if x.shape[1] > LENGTH and x.sum() > 0 else x


def test_beside_parts_there_is_none() -> None:
    assert COUNTER is not None
    model, plain = _planned(_Deciding(), dynamic=False), _Deciding()
    _step(model, _batch(0))
    model.zero_grad()
    for length in (LENGTH, 2 * LENGTH, 2 * LENGTH, LENGTH):
        for one in (model, plain):
            one.zero_grad()
        assert torch.equal(_step(model, _batch(0, length)), _step(plain, _batch(0, length)))
        _assert_equal(model, plain)
    assert not model.forward._arenas and all(
        entry.arena is None for one in model.forward.entries.values() for entry in one
    )


def test_overlapping_measurements_of_what_is_reserved() -> None:
    began, ended = threading.Event(), threading.Event()
    found = []

    def outer() -> None:
        kept = torch.empty(1 << 22, dtype=torch.uint8)
        began.set()
        ended.wait(10)
        del kept

    worker = threading.Thread(target=lambda: found.append(lowtide.measure(outer)))
    worker.start()
    began.wait(10)
    with PeakWindow(reserved_meter(COUNTER)):
        ended.set()
        worker.join()
    assert found[0].reserved_bytes is not None and found[0].reserved_bytes >= 1 << 22


def test_another_device_has_none() -> None:
    from lowtide.memory.arena import new_arena

    with pytest.raises(lowtide.PlanError, match="PyTorch has none of meta here; leave it out"):
        new_arena(torch.device("meta"))
    with pytest.raises(lowtide.PlanError, match="arena='yes' is unknown; use True or False"):
        lowtide.rematerialize(_transformer(), budget="50%", arena="yes")  # type: ignore[arg-type]
