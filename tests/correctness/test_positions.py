"""Numbers that say where in a tensor a forward pass reads or writes: queues, masks that are drawn beforehand, random crops. One
program for all places, whatever they are."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lowtide
from lowtide.capture.trace.classes import TRACED
from tests.support.beside import assert_same_steps, plain_and_planned
from tests.support.wide import pairs

STEPS = 9
ROWS = 6
Compute = Callable[[Any, torch.Tensor], torch.Tensor]


class _Places(nn.Module):
    """Returns what ``compute(self, h)`` makes of its hidden rows. The queue has place for some calls, and then begins anew."""

    pointer: torch.Tensor
    queue: torch.Tensor
    columns: torch.Tensor

    def __init__(self, compute: Compute) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.table = nn.Parameter(torch.randn(40, 8))
        self.heads = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.register_buffer("queue", torch.randn(4 * ROWS, 8))
        self.register_buffer("columns", torch.randn(8, 4 * ROWS))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))
        self.masks = torch.rand(50, 8)  # no buffer
        self.compute = compute
        self.place, self.other, self.negative = 0, 0, -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute(self, self.second(torch.tanh(self.first(x))))


def _mask(self: Any, h: torch.Tensor) -> torch.Tensor:
    if self.place + len(h) > len(self.masks):
        self.place = 0
    mask = self.masks[self.place : self.place + len(h)]
    self.place = self.place + len(h)
    return (h * mask).square().sum()


def _queue(self: Any, h: torch.Tensor) -> torch.Tensor:
    loss = (h @ self.queue.clone().t()).logsumexp(1).mean()
    with torch.no_grad():
        self.queue[self.place : self.place + len(h)] = h.detach()
    self.place = (self.place + len(h)) % len(self.queue)
    return loss


def _pointer(self: Any, h: torch.Tensor) -> torch.Tensor:
    loss = (h @ self.columns.clone()).logsumexp(1).mean()
    with torch.no_grad():
        place = int(self.pointer)
        self.columns[:, place : place + len(h)] = h.detach().T
        self.pointer[0] = (place + len(h)) % self.columns.shape[1]
    return loss


def _two_places(self: Any, h: torch.Tensor) -> torch.Tensor:
    one, two = self.masks[self.place : self.place + 6], self.queue[self.other : self.other + 6]
    self.place, self.other = (self.place + 2) % 40, (self.other + 5) % 17
    return (h * one + two).square().sum()


def _of_a_parameter(self: Any, h: torch.Tensor) -> torch.Tensor:
    rows = self.table[self.place + 3 : self.place + 9]
    self.place = (self.place + 3) % 30
    return (h + rows).square().sum()


def _one(self: Any, h: torch.Tensor) -> torch.Tensor:
    self.place += 1
    return (h * self.table[self.place] + self.masks[..., self.place % 7, :]).square().sum()


def _behind_others(self: Any, h: torch.Tensor) -> torch.Tensor:
    self.place += 1
    columns = self.columns[None, :, self.place : self.place + 6]
    chosen = self.columns[torch.tensor([0, 2, 4, 1, 3, 5]), self.place - 1]
    return (h.t() * columns[0]).sum() + (h[:, 0] * chosen).sum()


def _from_the_end(self: Any, h: torch.Tensor) -> torch.Tensor:
    self.place += 1
    rows = self.table[30 - self.place : 36 - self.place] + self.table[-self.place + 20 : 26 - self.place]
    return (h * rows).square().sum() + self.table[39 - self.place].sum()


def _also_a_factor(self: Any, h: torch.Tensor) -> torch.Tensor:
    self.place += 1
    return (h * self.place * self.masks[self.place : self.place + 6]).square().sum() / (self.place + 1)


def _written_in_place(self: Any, h: torch.Tensor) -> torch.Tensor:
    part = self.queue[self.place : self.place + 6]
    part.mul_(0.5).add_(1)
    self.queue[self.place] = 0.25
    self.place = (self.place + 1) % 18
    return (h * part.clone()).square().sum() + self.queue.sum()


def _random_crop(self: Any, h: torch.Tensor) -> torch.Tensor:
    begin = random.randint(0, 34)
    return (h * self.table[begin : begin + 6]).square().sum()


def _read_of_a_tensor(self: Any, h: torch.Tensor) -> torch.Tensor:
    nearest = int((h.detach().sum(1)).argmax())
    return (h[nearest] * self.table[nearest : nearest + 6]).square().sum() + h[nearest - 0].sum()


def _drawn_by_a_tensor(self: Any, h: torch.Tensor) -> torch.Tensor:
    begin = torch.randint(0, 34, (1,)).item()
    return (h * self.table[begin : begin + 6]).square().sum()


def _rolled(self: Any, h: torch.Tensor) -> torch.Tensor:
    best = torch.topk(h.mean(0), 2)[1]
    delayed = sum((torch.roll(h, -int(best[number]), -1) * self.table[number]).sum() for number in range(2))
    by = random.randint(-3, 9)
    both = torch.roll(h, shifts=(by, 1), dims=(0, 1)).roll((-by, int(best[0])), (0, 1)) + h.roll(by + 1)
    return delayed + (both * h).square().sum()  # type: ignore[no-any-return]


def _rolled_images(self: Any, h: torch.Tensor) -> torch.Tensor:
    """Channels last, or not, by how far they are rolled."""
    images = h.view(3, 2, 2, 4).to(memory_format=torch.channels_last)
    by = int(h.detach().sum(1).argmax())
    rolled = images.roll((by, -by), (2, 3))
    return (rolled.exp() * images).sum() + torch.as_strided(rolled, (8,), (1,)).square().sum() + rolled.stride(1)


def _narrowed(self: Any, h: torch.Tensor) -> torch.Tensor:
    nearest, begin = int(h.detach().sum(1).argmax()), random.randint(0, 33)
    rows = self.table.narrow(0, begin, 6) + torch.narrow(self.table, dim=-2, start=nearest, length=6)
    rows = rows + self.table.narrow(0, h.detach().sum(1).argmax(), 6)
    return (h * rows).sum() + h.select(0, nearest).square().sum() + torch.select(h.t(), 1, nearest).sum()


def _segments(self: Any, h: torch.Tensor) -> torch.Tensor:
    begins = (torch.rand(4) * 30).long()
    parts = torch.zeros(4, 6, 8)
    for number in range(4):
        begin = begins[number]
        parts[number] = h * self.table[begin : begin + 6]
    return parts.square().sum()


def _nearest(self: Any, h: torch.Tensor) -> torch.Tensor:
    where = h.detach().sum(1).argmax()
    return h[where].square().sum() + h.mean() + h[..., where].sum()


def _random_crop_of_arrays(self: Any, h: torch.Tensor) -> torch.Tensor:
    begin = np.random.randint(0, 34)
    return (h * self.table[begin : begin + 6]).square().sum()


def _masked_by_lengths(self: Any, h: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros(6, 8)
    for row, length in enumerate((torch.rand(6) * 9).long().tolist()):
        mask[row, :length] = 1
    return (h * mask).square().sum()


def _up_to_tensors_of_one_dimension(self: Any, h: torch.Tensor) -> torch.Tensor:
    lengths, mask = (torch.rand(6, 1) * 9).long(), torch.zeros(6, 8)
    for row in range(6):
        mask[row, : lengths[row]] = 1
    begin = lengths[0]
    return (h * mask * self.table[begin : begin + 6]).square().sum()


def _up_to_tensors_and_leaves_one(self: Any, h: torch.Tensor) -> torch.Tensor:
    self.left = h.detach().mean()  # by which a call is run before it is traced
    return _up_to_tensors_of_one_dimension(self, h) + self.table[(torch.rand(()) * 9).long()].sum()


def _cut_out(self: Any, h: torch.Tensor) -> torch.Tensor:
    h = h.clone()
    begin, end, height = random.randint(0, 4), random.randint(2, 8), torch.randint(0, 9, (1,))[0]
    h[..., begin:end] = 0.5
    h[2:-1, height:] = h.detach().mean()
    h[None, random.randint(0, 5), : self.place] = -1
    self.place = (self.place + 1) % 8
    self.queue[self.place :, 3:] = self.place
    return h.square().sum() + self.queue.sum()


def _moved_in_place(self: Any, h: torch.Tensor) -> torch.Tensor:
    begins = (torch.rand(2) * 15).long()
    begin = begins[0]
    end = begin + 6
    first = h * self.table[begin:end]
    begins.add_(2)
    second = h * self.table[begin : begin + 6]
    begin += 3
    return (first + second * self.table[begin : begin + 6]).square().sum() + self.table[begin].sum()


ONE_PROGRAM = [
    _mask, _queue, _pointer, _two_places, _of_a_parameter, _one, _behind_others, _from_the_end, _also_a_factor,
    _written_in_place, _masked_by_lengths, _cut_out, _moved_in_place, _random_crop, _random_crop_of_arrays, _segments, _nearest,
    _up_to_tensors_of_one_dimension, _up_to_tensors_and_leaves_one, _read_of_a_tensor, _drawn_by_a_tensor, _rolled, _narrowed,
]  # fmt: skip


def _chosen(self: Any, h: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = random.choice(self.heads)(h) * random.choice(seq=(0.5, 2.0))
    try:
        random.choice([])
    except IndexError:
        return made.square().sum()
    return made.sum()


def _written_by_its_data(self: Any, h: torch.Tensor) -> torch.Tensor:
    begin = (torch.rand(()) * 15).long()
    end = begin + 6
    first = self.table[begin:end] + self.table[begin]
    begin.data.add_(3)
    return (h * first).square().sum() + self.table[begin].sum() + self.table[end].sum()


def _sums_with_factors(self: Any, h: torch.Tensor) -> torch.Tensor:
    begin = (torch.rand(()) * 5).long()
    short = begin.to(torch.int8)
    parts = self.table[torch.add(begin, 2, alpha=4)], self.table[begin.add(1, alpha=3)], self.table[short + 120 - 110]
    return (h * sum(parts)).square().sum()


def _with_a_mask_of_numpys(self: Any, h: torch.Tensor) -> torch.Tensor:
    self.place = (self.place + 1) % 5
    mask = np.zeros((1, 6), dtype=bool)
    mask[0, 2] = True
    return (h[None][mask, self.place] * h[None, [0, 1], self.place]).sum() + h.mean()


def _one_of_few(self: Any, h: torch.Tensor) -> torch.Tensor:
    h = self.heads[self.place % 3](h) * {0: 1.0, 1: 2.0}[self.place % 2]
    for _ in range(self.place % 3):
        h = torch.tanh(h)
    self.place += 1
    return h.square().sum() * (2 if str(self.place % 3) == "1" else 1)


def _of_a_sum_that_moves(self: Any, h: torch.Tensor) -> torch.Tensor:
    begin = (torch.rand(()) * 15).long()
    end = begin + 6
    begin.add_(1)
    return h.square().sum() * self.table[begin : begin + 6].sum() * self.table[begin:end].sum()


def _to_the_end(self: Any, h: torch.Tensor) -> torch.Tensor:
    rest = self.queue[self.place :]
    self.place = (self.place + 1) % 5
    return h.square().sum() * rest.sum()


def _longer_each_time(self: Any, h: torch.Tensor) -> torch.Tensor:
    self.place += 1
    return (h * self.table[: self.place].sum()).square().sum() + self.table[2 * self.place : 3 * self.place].sum()


def _cut_at_the_end(self: Any, h: torch.Tensor) -> torch.Tensor:
    part = self.queue[self.place : self.place + 6]
    self.place = (self.place + 5) % 24
    return h.square().sum() * part.sum()


def _from_the_end(self: Any, h: torch.Tensor) -> torch.Tensor:
    self.negative = -1 - (-self.negative % 5)
    return (h * self.table[self.negative]).square().sum() + self.table[self.negative - 3 : self.negative].sum()


def _every_other(self: Any, h: torch.Tensor) -> torch.Tensor:
    part = self.table[self.place : self.place + 12 : 2]
    self.place = (self.place + 1) % 5
    return (h * part).square().sum()


def _of_a_list(self: Any, h: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = self.heads[self.place](h)
    self.place = (self.place + 1) % 3
    return made.square().sum()


def _returned(self: Any, h: torch.Tensor) -> Any:
    part = self.queue[self.place : self.place + 6]
    self.place = (self.place + 1) % 5
    return h.square().sum(), part, self.place


def _with_a_mask(self: Any, h: torch.Tensor) -> torch.Tensor:
    part = self.table[:, self.place][torch.arange(40) < 6]
    self.place = (self.place + 1) % 5
    return (h[:, 0] * part).sum()


EVERY = [
    *ONE_PROGRAM, _chosen, _to_the_end, _longer_each_time, _cut_at_the_end, _from_the_end, _every_other,
    _of_a_sum_that_moves, _written_by_its_data, _sums_with_factors, _with_a_mask_of_numpys, _one_of_few, _of_a_list,
    _returned, _with_a_mask, _rolled_images,
]  # fmt: skip


def _step(model: Any, number: int) -> Any:
    random.seed(number)
    np.random.seed(number)
    returned = model(torch.randn(ROWS, 8))
    (returned[0] if isinstance(returned, tuple) else returned).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(0.01 * parameter.grad if parameter.grad is not None else 0)
    return returned, model.place, model.other, model.negative, model.masks.clone(), random.random(), np.random.rand()


OPTIONS = ({}, {"budget": "100%", "planner": "auto"}, {"dynamic": True}, {"arena": True})


@pytest.mark.parametrize("compute", ONE_PROGRAM)
def test_one_program_for_all_places(compute: Compute, caplog: pytest.LogCaptureFixture) -> None:
    plain, planned = plain_and_planned(lambda: _Places(compute), on_capture_error="error")
    with caplog.at_level(logging.INFO, "lowtide"):
        assert_same_steps(plain, planned, _step, STEPS)
    assert caplog.text.count("is captured again") <= 2  # a buffer is known to be counted on from its second call


@pytest.mark.parametrize(("compute", "options"), pairs(EVERY, OPTIONS))
def test_whatever_places_there_are_is_as_in_eager(compute: Compute, options: dict[str, Any]) -> None:
    plain, planned = plain_and_planned(lambda: _Places(compute), **options)
    assert_same_steps(plain, planned, _step, STEPS)


def test_what_stands_for_methods_is_gone_when_a_call_is_captured() -> None:
    model = _Places(_rolled)
    lowtide.rematerialize(model, (torch.randn(ROWS, 8),), budget="100%", planner="greedy")
    assert not any("roll" in vars(kind) for kind in TRACED)
    assert torch.roll is torch._C._VariableFunctions.roll  # type: ignore[attr-defined]


def test_a_method_that_the_user_replaces_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def first(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
        return tensor[:ROWS] * 2

    def step(model: Any, number: int) -> Any:
        monkeypatch.undo()
        if number in (3, 4):
            monkeypatch.setattr(torch.Tensor, "roll", first, raising=False)
            monkeypatch.setattr(torch.Tensor, "narrow", first, raising=False)
        returned = _step(model, number)
        monkeypatch.undo()
        return returned

    for compute in (_rolled, _narrowed):
        assert_same_steps(*plain_and_planned(lambda compute=compute: _Places(compute)), step, STEPS)  # type: ignore[misc]


def test_a_place_that_the_caller_sets_may_be_outside() -> None:
    def step(model: Any, number: int) -> Any:
        model.place = (0, 3, 18, 19, 23, 24, 30, -1, -7)[number]
        return _step(model, number)

    def compute(self: Any, h: torch.Tensor) -> torch.Tensor:
        return h.square().sum() * self.queue[self.place : self.place + 6].sum()

    plain, planned = plain_and_planned(lambda: _Places(compute))
    assert_same_steps(plain, planned, step, STEPS)


def test_a_place_among_the_arguments() -> None:
    class Model(_Places):
        def forward(self, x: torch.Tensor, place: int) -> torch.Tensor:  # type: ignore[override]
            return (self.first(x) * self.table[place : place + ROWS]).square().sum()

    def step(model: Any, number: int) -> Any:
        returned = model(torch.randn(ROWS, 8), 3 * number)
        returned.backward()
        return returned

    plain, planned = plain_and_planned(lambda: Model(_mask))
    assert_same_steps(plain, planned, step, STEPS)


def _times(self: Any, x: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    return (self.first(x) * number.item()).square().sum()


def _place_in_the_arguments(self: Any, x: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    begin = int(number)
    return (self.first(x) * self.table[begin : begin + ROWS]).square().sum() + self.table[number + 1].sum()


def _schedule(self: Any, x: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    return (self.first(x) * math.cos(float(number) / 9)).square().sum()


def _weighted(self: Any, x: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    return (self.first(x) * number.double().mul(0.1).item()).square().sum()


def _as_a_size(self: Any, x: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    return self.first(x).square().sum() * self.table[: int(number) + 1].sum()


def _how_often(self: Any, x: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    for _ in range(int(number) % 3):
        x = torch.tanh(self.first(x))
    return (self.second(x) * self.table[number]).square().sum()


@pytest.mark.parametrize(
    ("compute", "captures"),
    [(_times, 1), (_weighted, 1), (_place_in_the_arguments, 1), (_schedule, 1), (_as_a_size, 9), (_how_often, 9)],
)
def test_a_number_that_a_tensor_among_the_arguments_brings(
    compute: Callable[..., torch.Tensor], captures: int, caplog: pytest.LogCaptureFixture
) -> None:
    """One program once it was another one in a second call, where it decides no more than a place or a factor."""

    class Model(_Places):
        def forward(self, x: torch.Tensor, number: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return compute(self, x, number)

    def step(model: Any, number: int) -> Any:
        returned = model(torch.randn(ROWS, 8), torch.tensor(3 * number + 1))
        returned.backward()
        return returned

    plain, planned = plain_and_planned(lambda: Model(_mask))
    with caplog.at_level(logging.INFO, "lowtide"):
        assert_same_steps(plain, planned, step, STEPS)
    assert caplog.text.count("is captured again") <= captures


@pytest.mark.parametrize("of_buffer", [False, True])
@pytest.mark.parametrize("leave", ["attribute", "item", "object", "sum", "list"])
def test_numbers_of_tensors_that_others_bring_and_a_pass_leaves(leave: str, of_buffer: bool) -> None:
    """In attributes, whatever the number was in the calls that were traced."""

    class Model(_Places):
        def forward(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            number = int(self.pointer if of_buffer else given)
            if leave == "attribute":
                self.place = number
            elif leave == "item":
                self.left["number"] = number + 1
            elif leave == "object":
                self.first.seen = number
            elif leave == "sum":
                self.other += number
            else:
                self.left = [number, number * 2]
            self.pointer[0] = (number + 3) % 17
            return self.first(x).square().sum() * (number + 1)

    def build() -> nn.Module:
        model: Any = Model(_mask)
        model.left, model.first.seen = {"number": 0, "more": 1}, 0
        return model

    def step(model: Any, number: int) -> Any:
        returned = model(torch.randn(ROWS, 8), torch.tensor(3 * number + 1))
        returned.backward()
        return returned, model.place, model.other, repr(model.left), model.first.seen

    plain, planned = plain_and_planned(build)
    assert_same_steps(plain, planned, step, STEPS)
