"""Gradients of results as large as the results: programs own those of a loss, and count those that others hold to the end."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import lowtide
from lowtide.program.tangents import owns_tangents
from lowtide.solve import minimum_peak
from tests.support.records import assert_same_records, run_training
from tests.support.scarce import memory_of
from tests.support.training import MINIMUM, QUICK, Inputs, compare_training, make, prepared

_ROWS, _WIDTH, _CLASSES = 64, 16, 256
_RESULTS = 4 * _ROWS * _CLASSES  # bytes
Step = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]


class Classifier(nn.Module):
    """Its results are most of what it takes."""

    def __init__(self, inner: int = _WIDTH) -> None:
        super().__init__()
        widths = (_WIDTH, inner, inner, inner)
        self.body = nn.Sequential(
            *(layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.GELU(), nn.Dropout(0.1)))
        )
        self.head = nn.Linear(inner, _CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.body(x))
        return scores.tanh()


def _inputs(iteration: int) -> Inputs:
    generator = torch.Generator().manual_seed(iteration)
    return (torch.randn(_ROWS, _WIDTH, generator=generator),), {}


def _loss(scores: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(scores, torch.arange(len(scores)) % _CLASSES)


def _handed(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A step that holds the gradient which it hands in."""
    scores = model(*args, **kwargs)
    gradient = torch.full_like(scores, 0.5)
    scores.backward(gradient)
    assert gradient[0, 0] == 0.5
    return scores


def _watched(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A step in which a hook keeps the gradient of the results until the next."""
    scores = model(*args, **kwargs)
    scores.register_hook(lambda gradient: setattr(_watched, "seen", gradient))
    _loss(scores).backward()
    assert _watched.seen.count_nonzero() > 0  # type: ignore[attr-defined]
    return scores


def _twice(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    scores = model(*args, **kwargs)
    _loss(scores).backward(retain_graph=True)
    _loss(scores * 2).backward()
    return scores


def _in_pieces(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A step whose gradient of the results is a sum."""
    scores = model(*args, **kwargs)
    (_loss(scores[:32]) + _loss(scores[32:]) + scores.square().mean()).backward()
    return scores


def _owned(model: nn.Module) -> list[bool]:
    return [owns_tangents(plan.graph) for plan in lowtide.plans(model)]


@functools.cache
def _least(factory: Callable[[], nn.Module] = Classifier) -> int:
    with pytest.raises(lowtide.InfeasibleBudgetError) as raised:
        lowtide.rematerialize(make(factory), *_inputs(0), budget=1, planner=QUICK)
    return raised.value.minimum_bytes


def test_those_of_a_loss_are_let_go_of() -> None:
    """Within less than any plan needs that counts them to the end, and the measured peak is the predicted one."""
    (outcome,) = compare_training(Classifier, _inputs, _loss, budgets=(MINIMUM,))
    (plan,) = lowtide.plans(outcome.model)
    (whole,) = lowtide.plans(lowtide.rematerialize(make(Classifier), *_inputs(0), budget="100%", planner=QUICK))
    assert owns_tangents(plan.graph) and not owns_tangents(whole.graph)
    assert plan.peak_bytes < minimum_peak(whole.graph, whole.costs)[0]


def test_a_later_shape_may_need_it() -> None:
    """A first batch that fits without, and a longer one that does not: from then on all programs own them."""

    def growing(iteration: int) -> Inputs:
        (x,), _ = _inputs(iteration)
        return (x[: _ROWS // 2] if iteration < 2 else x,), {}

    (outcome,) = compare_training(Classifier, growing, _loss, budgets=(_least(),), iterations=5, check_peak=False)
    assert _owned(outcome.model) == [True]


@pytest.mark.parametrize("step", [_handed, _watched, _twice, _in_pieces])
def test_whoever_holds_them(step: Step) -> None:
    """The bits are eager's, and once they were seen to be held, plans count them to the end."""
    expected = run_training(make(Classifier), _inputs, step, 4)
    model = prepared(Classifier, _inputs, "95%", rescue=False)
    assert _owned(model) == [True]
    assert_same_records(run_training(model, _inputs, step, 4), expected)
    assert _owned(model) == [step in (_twice, _in_pieces)]


def test_a_pass_whose_gradients_are_held_keeps_to_the_budget() -> None:
    """But for the results of the first, whose forward pass runs again: the caller has them already."""
    model = prepared(Classifier, _inputs, "95%", rescue=False)
    peaks = [lowtide.measure(_handed, model, *_inputs(0)).peak_bytes for _ in range(2)]
    (plan,) = lowtide.plans(model)
    assert _owned(model) == [False]
    assert peaks[0] <= plan.budget_bytes + _RESULTS
    assert peaks[1] == plan.peak_bytes <= plan.budget_bytes


def test_what_others_hold_and_does_not_fit(caplog: pytest.LogCaptureFixture) -> None:
    """It is theirs: the plan takes the least that it can with it, and says so."""
    expected = run_training(make(Classifier), _inputs, _handed, 3)
    model = prepared(Classifier, _inputs, _least())
    (before,) = lowtide.plans(model)
    assert_same_records(run_training(model, _inputs, _handed, 3), expected)
    (plan,) = lowtide.plans(model)
    assert before.peak_bytes < plan.peak_bytes <= before.peak_bytes + _RESULTS
    assert f"do not fit into the budget of {before.budget_bytes} bytes" in caplog.text
    assert lowtide.measure(_handed, model, *_inputs(0)).peak_bytes <= plan.peak_bytes


def test_a_shape_that_does_not_fit_by_itself_is_refused() -> None:
    """What others hold is no reason to exceed the budget by more than that."""
    model = prepared(Classifier, _inputs, _least())
    _handed(model, *_inputs(0))
    with pytest.raises(lowtide.InfeasibleBudgetError):
        model(torch.randn(4 * _ROWS, _WIDTH))


@pytest.mark.parametrize("after", ["head.weight", "body.6.weight"])
def test_memory_that_runs_out_after_they_were_let_go_of(after: str) -> None:
    """That pass cannot run again, and says so; the next one is eager's. When the gradient of the head leaves, there is what was
    written over the one that arrived."""
    large = functools.partial(Classifier, 256)  # so that gradients leave one by one
    model, plain = prepared(large, _inputs, _least(large)), make(large)
    assert _owned(model) == [True]
    with contextlib.ExitStack() as ends:
        hook = model.get_parameter(after).register_post_accumulate_grad_hook(
            lambda _: ends.enter_context(memory_of(-64 << 10))
        )
        ends.callback(hook.remove)
        with pytest.raises(RuntimeError, match="can't allocate memory") as raised:
            _loss(model(*_inputs(0)[0])).backward()
    assert "let go of gradients" in "".join(raised.value.__notes__)
    gradients = []
    for one in (plain, model):
        one.zero_grad()
        torch.manual_seed(3)
        _loss(one(*_inputs(1)[0])).backward()
        gradients.append([parameter.grad for parameter in one.parameters()])
    assert all(map(torch.equal, *gradients))
