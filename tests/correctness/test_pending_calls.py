"""Rows: two forwards, then the two backwards in either order; gradient accumulation; backward twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from tests.support.networks import WithLoss, perceptron, rows
from tests.support.records import Step
from tests.support.training import MINIMUM, compare_training, prepared


def _network() -> nn.Module:
    return WithLoss(nn.Sequential(perceptron(3), nn.Dropout(0.2), nn.BatchNorm1d(32), perceptron(3)))


def _one_input(iteration: int) -> Any:
    return rows()(iteration)


def _pending(order: Sequence[int]) -> Step:
    def step(model: nn.Module, args: Any, kwargs: Any) -> Any:
        losses = [model(args[0]), model(args[0].flip(0) + 1)]
        for index in order:
            losses[index].backward()
        return losses

    return step


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first first", "last first"])
def test_two_forwards_then_two_backwards(order: Sequence[int]) -> None:
    compare_training(_network, _one_input, step=_pending(order), check_peak=False)


def test_two_forwards_one_backward_of_the_sum() -> None:
    def step(model: nn.Module, args: Any, kwargs: Any) -> Any:
        loss = model(args[0]) + model(args[0] * 2)
        loss.backward()
        return loss

    compare_training(_network, _one_input, step=step, check_peak=False)


def test_forward_without_backward_in_between() -> None:
    """A training forward whose result is dropped keeps nothing and disturbs nothing."""

    def step(model: nn.Module, args: Any, kwargs: Any) -> Any:
        model(args[0] + 1)
        loss = model(args[0])
        loss.backward()
        return loss

    compare_training(_network, _one_input, step=step, check_peak=False)


def test_output_fed_into_the_model_again() -> None:
    """One autograd graph with the model in it twice, one call behind the other."""

    def step(model: nn.Module, args: Any, kwargs: Any) -> Any:
        y = model(model(args[0]))
        y.square().mean().backward()
        return y

    compare_training(
        lambda: perceptron(4), rows(requires_grad=True), step=step, check_peak=False, budgets=("70%", MINIMUM), quick=0
    )


def test_gradient_accumulation() -> None:
    def step(model: nn.Module, args: Any, kwargs: Any) -> Any:
        losses = []
        for shift in range(3):
            loss = model(args[0] + shift) / 3
            loss.backward()
            losses.append(loss)
        return losses

    compare_training(_network, _one_input, step=step, check_peak=False)


def test_gradients_present_at_the_start() -> None:
    def step(model: nn.Module, args: Any, kwargs: Any) -> Any:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        loss = model(args[0])
        loss.backward()
        return loss

    compare_training(_network, _one_input, step=step, check_peak=False)


def test_backward_twice_with_retain_graph() -> None:
    def step(model: nn.Module, args: Any, kwargs: Any) -> Any:
        loss = model(args[0])
        loss.backward(retain_graph=True)
        loss.backward()
        return loss

    compare_training(_network, _one_input, step=step, check_peak=False)


def test_many_backwards_take_one_plan() -> None:
    """One task after the other through one call."""

    def step(model: nn.Module, args: Any, kwargs: Any) -> Any:
        results = model(*args)
        for column in range(4):
            results[:, column].sum().backward(retain_graph=True)
        return results

    (outcome,) = compare_training(lambda: perceptron(3), rows(), step=step, budgets=("100%",), check_peak=False)
    assert len(lowtide.plans(outcome.model)) == 1


@pytest.mark.parametrize("loss", [torch.sum, lambda y: y.square().mean()], ids=["other layout", "as planned"])
def test_parameters_changed_before_the_backward_pass(loss: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The backward pass of the last layer reads its weight through a view."""
    model = perceptron(3)
    lowtide.rematerialize(model, rows()(0)[0], budget="100%", planner="greedy")
    y = model(*rows()(0)[0])
    with torch.no_grad():
        model[4].weight.mul_(2)
    with pytest.raises(lowtide.ExecutionError, match=r"4\.weight was modified in place"):
        loss(y).backward()


def test_what_only_another_forward_pass_reads_may_not_change_either() -> None:
    """A gradient in another layout than planned for, so the forward pass runs again."""
    model = perceptron(3)
    lowtide.rematerialize(model, rows()(0)[0], budget="100%", planner="greedy")
    y = model(*rows()(0)[0])
    with torch.no_grad():
        model[0].bias.add_(1)
    with pytest.raises(lowtide.ExecutionError, match=r"0\.bias was modified in place"):
        y.sum().backward()


def test_second_backward_without_retain_graph_is_an_error() -> None:
    model = prepared(_network, _one_input, "60%")
    loss = model(*_one_input(0)[0])
    loss.backward()
    with pytest.raises(RuntimeError, match=r"backward through the graph a second time"):
        loss.backward()


def test_double_backward_is_an_error_that_says_so() -> None:
    """Where no code around the call names it, see ``test_differentiated_again``."""
    again = {"_".join(("create", "graph")): True}

    def make() -> nn.Module:
        return perceptron(3)

    model = prepared(make, rows(requires_grad=True), "70%")
    (x,), _ = rows(requires_grad=True)(0)
    with pytest.raises(lowtide.ExecutionError, match="cannot be differentiated again"):
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, **again)
        gradient.square().sum().backward()
