"""Row: another batch size or sequence length, last short batch: planned anew, or eager with one warning, as configured."""

from __future__ import annotations

import copy
import functools
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lowtide
from tests.support.networks import BATCH, WithLoss, generator, perceptron, rows
from tests.support.training import compare_training, prepared

_SIZES = (256, 192, 256, 5, 192)


def _network() -> nn.Module:
    return WithLoss(nn.Sequential(perceptron(3), nn.Dropout(0.1), perceptron(3)))


def _changing(iteration: int) -> Any:
    return (torch.randn(_SIZES[iteration], 32, generator=generator(iteration)),), {}


def test_other_batch_sizes_are_planned_anew() -> None:
    outcomes = compare_training(_network, _changing, iterations=len(_SIZES))
    for outcome in outcomes:
        plans = lowtide.plans(outcome.model)
        assert len(plans) == len(set(_SIZES))
        assert len({plan.unconstrained_peak_bytes for plan in plans}) == len(set(_SIZES))


def test_every_signature_keeps_its_budget() -> None:
    model = prepared(_network, _changing, "60%")
    for iteration in range(2):
        model(*_changing(iteration)[0]).backward()
    for iteration, plan in enumerate(lowtide.plans(model)):
        model.zero_grad(set_to_none=True)
        args, _ = _changing(iteration)
        assert lowtide.measure(lambda args=args: model(*args).backward()).peak_bytes <= plan.budget_bytes


def test_eager_on_new_signature_warns_once() -> None:
    def compare() -> Any:
        return compare_training(_network, _changing, iterations=5, budgets=("60%",), on_new_signature="eager")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (outcome,) = compare()
    ours = [w for w in caught if "signature" in str(w.message)]
    assert len(ours) == 1
    assert len(lowtide.plans(outcome.model)) == 1


def test_error_on_new_signature() -> None:
    model = prepared(_network, _changing, "60%", on_new_signature="error")
    model(*_changing(0)[0]).backward()
    with pytest.raises(lowtide.LowtideError, match="signature"):
        model(*_changing(1)[0])
    model(*_changing(2)[0]).backward()


def test_infeasible_budget_for_a_new_signature() -> None:
    """A fixed number of bytes that fits the sample but not a larger batch is an error that names the minimum."""
    model = prepared(_network, _changing, "60%")
    budget = lowtide.plans(model)[0].budget_bytes
    lowtide.restore(model)
    lowtide.rematerialize(model, *_changing(0), budget=budget, planner="greedy")
    with pytest.raises(lowtide.InfeasibleBudgetError) as caught:
        model(torch.randn(4096, 32))
    assert caught.value.minimum_bytes > budget
    model(*_changing(0)[0]).backward()


def test_plain_arguments_are_part_of_the_signature() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = perceptron(4)

        def forward(self, x: torch.Tensor, power: int = 1) -> torch.Tensor:
            return self.body(x).pow(power).mean() if power < 3 else self.body(x).sin().mean()

    def inputs(iteration: int) -> Any:
        return rows()(iteration)[0], {"power": (1, 2, 3, 1)[iteration]}

    (outcome,) = compare_training(Scaled, inputs, iterations=4, budgets=("60%",))
    assert len(lowtide.plans(outcome.model)) == 3


class _Options:
    """Compares by identity. It refers to itself."""

    def __init__(self, scale: float) -> None:
        self.nested = SimpleNamespace(scales=[scale])
        self.logger = logging.getLogger(__name__)
        self.itself = self

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.nested.scales[0]


def _closure(scale: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x * scale


class _Applies(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = perceptron(2)

    def forward(self, x: torch.Tensor, transform: Any) -> torch.Tensor:
        transform = getattr(transform, "apply", transform)
        return transform(self.network(x)).square().mean()


def _losses(transforms: Iterable[Any]) -> Iterator[tuple[float, float, int]]:
    """The planned loss, the plain one, and how many plans there are, for every transform."""
    x = torch.randn(8, 32, generator=generator(0))
    plain, model = _Applies(), _Applies()
    model.load_state_dict(plain.state_dict())
    for number, transform in enumerate(transforms):
        if number == 0:
            lowtide.rematerialize(model, (x, transform), budget="100%", planner="greedy")
        yield model(x, transform).item(), plain(x, transform).item(), len(lowtide.plans(model))


@pytest.mark.parametrize(
    "make",
    [
        _Options,
        _closure,
        lambda scale: _Options(scale).apply,
        lambda scale: functools.partial(torch.mul, other=scale),
        lambda scale: SimpleNamespace(apply=_closure(scale)),
    ],
    ids=["object", "closure", "method", "partial", "namespace"],
)
def test_objects_are_told_apart_by_what_they_hold(make: Callable[[float], Any]) -> None:
    found = list(_losses(make(scale) for scale in (2.0, 2.0, 3.0, 2.0, 3.0)))
    assert [ours for ours, _, _ in found] == [theirs for _, theirs, _ in found]
    assert [plans for _, _, plans in found] == [1, 1, 2, 2, 2]


def test_an_object_that_is_changed_between_calls() -> None:
    options = _Options(2.0)

    def changing() -> Iterator[_Options]:
        for scale in (2.0, 3.0, 2.0, 5.0):
            options.nested.scales[0] = scale
            yield options

    found = list(_losses(changing()))
    assert [ours for ours, _, _ in found] == [theirs for _, theirs, _ in found]
    assert len({theirs for _, theirs, _ in found}) == 3


def test_masks_are_questions() -> None:
    """A decision on an integer input is captured with its answer; another answer is another program."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = perceptron(4)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            y = self.body(x)
            return y.mean() if mask.all() else (y * mask[:, None]).sum() / mask.sum()

    def inputs(iteration: int) -> Any:
        mask = torch.ones(BATCH, dtype=torch.int64)
        mask[: (0, 3, 0, 7)[iteration]] = 0
        return (*rows()(iteration)[0], mask), {}

    (outcome,) = compare_training(Masked, inputs, iterations=4, budgets=("60%",))
    assert len(lowtide.plans(outcome.model)) == 2


class _Shared(nn.Module):
    """Runs pictures of one size together, as DINO and SwAV do with their crops."""

    def __init__(self) -> None:
        super().__init__()
        self.body = perceptron(4)

    def forward(self, *crops: torch.Tensor) -> torch.Tensor:
        lengths = torch.tensor([len(crop) for crop in crops])
        ends = torch.cumsum(torch.unique_consecutive(lengths, return_counts=True)[1], 0)
        begin, total = 0, torch.zeros(())
        for end in ends:
            total, begin = total + self.body(torch.cat(crops[begin:end])).square().mean(), end
        return total


def test_runs_of_equal_numbers_are_questions() -> None:
    """Operators with several results, of which known values decide how long they are."""

    def inputs(iteration: int) -> Any:
        whole = rows()(iteration)[0][0]
        return tuple(whole[:length] for length in ((96, 96, 64), (96, 64, 64), (96, 96, 64))[iteration]), {}

    (outcome,) = compare_training(_Shared, inputs, iterations=3, budgets=("60%",))
    assert len(lowtide.plans(outcome.model)) == 2


class _Placed(nn.Module):
    """Has a matrix of which only some rows are learned, as those of LoRA for several projections: the mask is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.learned = perceptron(4), nn.Parameter(torch.randn(24, 32))
        self.chosen = torch.arange(32) % 4 != 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        matrix = torch.zeros(32, 32)
        matrix[self.chosen] = self.learned
        y: torch.Tensor = self.body(x) @ matrix.t()
        return y.mean() + y[:, self.chosen].square().mean()


def test_a_mask_that_the_model_holds_selects() -> None:
    torch.manual_seed(0)
    model = _Placed()
    plain = copy.deepcopy(model)
    lowtide.rematerialize(model, budget="100%", on_capture_error="error")
    for step in range(4):
        if step == 2:
            for one in (model, plain):
                one.chosen[:2] = torch.tensor([False, True])
        x = torch.randn(BATCH, 32)
        for one in (model, plain):
            one.zero_grad()
            one(x).backward()
        assert all(
            torch.equal(one.grad, other.grad) for one, other in zip(model.parameters(), plain.parameters(), strict=True)
        )


def test_integers_that_are_written_into_new_memory_answer() -> None:
    """Offsets of groups in a table that begins as ``new_empty``, as graph libraries compute them."""

    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = perceptron(4)

        def forward(self, x: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
            counts = torch.zeros(4, dtype=torch.int64).scatter_add_(0, group, torch.ones_like(group))
            ends = counts.new_empty(5)
            ends.narrow(0, 0, 1).zero_()
            torch.cumsum(counts, 0, out=ends.narrow(0, 1, 4))
            places = torch.arange(len(group)) - ends[group]
            first = torch.empty(len(group), dtype=torch.bool).copy_(places < 2)
            return self.body(x)[first].square().mean() / int(counts.max())

    model = Grouped()
    plain, numbers, (x,) = copy.deepcopy(model), torch.arange(BATCH), rows()(0)[0]
    groupings = ((numbers % 4).sort().values, (numbers // 2).clamp(max=3))
    lowtide.rematerialize(model, (x, groupings[0]), budget="80%", on_capture_error="error")
    for group in (*groupings, *groupings):
        loss, expected = model(x, group), plain(x, group)
        loss.backward()
        expected.backward()
        assert torch.equal(loss, expected)
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(one.grad, two.grad) for one, two in pairs)
    assert len(lowtide.plans(model)) == 2


def test_answers_that_never_repeat_are_said(caplog: pytest.LogCaptureFixture) -> None:
    """A number from a tensor that is another in every call, and says how often something is done, takes a plan per call:
    right, but slow, and said once."""

    class Warmed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = perceptron(2)

        def forward(self, x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
            return self.body(x).mean() / len(range(1 + step.item()))

    def inputs(iteration: int) -> Any:
        return (*rows()(iteration)[0], torch.tensor(iteration)), {}

    with caplog.at_level(logging.WARNING, logger="lowtide.runtime.model"):
        compare_training(Warmed, inputs, iterations=12, budgets=("80%",))
    (record,) = caplog.records
    assert "captured 8 times" in record.message
    assert "test_signatures.py" in record.message


@pytest.mark.parametrize("kind", ["texts", "arrays"])
def test_values_that_never_repeat_are_said(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """So are plain values among the arguments that its code looks at, and arrays, which compare item by item."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = perceptron(2)

        def forward(self, batch: dict[str, Any]) -> torch.Tensor:
            return self.body(batch["x"]).mean() * len(batch["paths"][1])

    def inputs(iteration: int) -> Any:
        paths = ["one.png", f"{iteration}.png"] if kind == "texts" else [np.arange(3), np.full(2, iteration)]
        return ({"x": rows()(iteration)[0][0], "paths": paths},), {}

    with caplog.at_level(logging.WARNING, logger="lowtide.runtime.programs.recaptures"):
        compare_training(Named, inputs, iterations=10, budgets=("80%",))
    (record,) = caplog.records
    said = {"texts": "('6.png' and '7.png', say)", "arrays": "(array([6, 6]) and array([7, 7]), say)"}[kind]
    assert "captured 8 times" in record.message and said in record.message


def test_no_sample_given() -> None:
    """Without a sample the plan is made at the first call."""
    model = _network()
    lowtide.rematerialize(model, budget="70%", planner="greedy")
    assert lowtide.plans(model) == []
    model(*_changing(0)[0]).backward()
    assert len(lowtide.plans(model)) == 1


def test_requires_grad_changes_are_noticed() -> None:
    def step(model: nn.Module, args: Any, kwargs: Any) -> Any:
        step.calls += 1
        model.body[0].requires_grad_(step.calls % 2 == 1)
        loss = model(*args)
        loss.backward()
        return loss

    step.calls = 0

    def inputs(iteration: int) -> Any:
        return rows()(iteration)

    compare_training(_network, inputs, step=step, check_peak=False, iterations=4, budgets=("60%",))


class _Chosen(nn.Module):
    """Asks about the mask with constants that are made anew, and die, in every round."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for i in range(40):
            row = mask[torch.tensor([i % 2])]
            if (row * torch.tensor([0.5, 2.0, 1.0])).sum() > 100 + i:
                x = x * 2
        result: torch.Tensor = self.layer(x).square().mean()
        return result


def test_constants_of_a_question_are_its_own() -> None:
    """Another answer is another program, the same answers the same program, whatever the memory of constants is used for."""
    masks = [torch.full((2, 3), value) for value in (1, 2, 100, 3, 101, 30)]

    def inputs(iteration: int) -> Any:
        return (torch.randn(64, 8, generator=generator(iteration)), masks[iteration]), {}

    (outcome,) = compare_training(_Chosen, inputs, iterations=len(masks), budgets=("100%",))
    assert len(lowtide.plans(outcome.model)) == 3
