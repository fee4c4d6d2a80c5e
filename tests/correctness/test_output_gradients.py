"""Row: loss ``y.sum()``, transposed or expanded output gradients, ``y.backward(g)``: exact, the caller's tensors untouched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.capture import capture
from tests.support.networks import BATCH, generator, perceptron, rows
from tests.support.records import Step
from tests.support.training import QUICK, compare_training

_GRADIENT = torch.randn(BATCH, 32, generator=generator(77))
_GRADIENTS = {
    "contiguous": _GRADIENT,
    "transposed": torch.randn(32, BATCH, generator=generator(78)).t(),
    "expanded": torch.randn(32, generator=generator(79)).expand(BATCH, 32),
    "scalar expanded": torch.tensor(0.5).expand(BATCH, 32),
    "strided": torch.randn(BATCH, 64, generator=generator(80))[:, ::2],
    "offset": torch.randn(BATCH + 1, 32, generator=generator(81))[1:],
}


def test_sum() -> None:
    compare_training(perceptron, rows(), lambda y: y.sum(), budgets=("100%", "70%", "45%"))


def test_mean_of_transposed() -> None:
    compare_training(perceptron, rows(), lambda y: (y.t() * torch.ones(BATCH)).t()[:, :5].mean())


def _backward_with(gradient: torch.Tensor, *, touch: bool = False) -> Step:
    def step(model: nn.Module, args: Any, kwargs: Any) -> Any:
        y = model(*args)
        kept = y.detach().clone()
        given = gradient.clone() if gradient.is_contiguous() else gradient
        before, version = given.clone(), given._version
        y.backward(given)
        assert torch.equal(given, before), "the caller's output gradient was changed"
        assert given._version == version
        assert torch.equal(y, kept), "the caller's output was changed"
        return y

    return step


@pytest.mark.parametrize("name", _GRADIENTS)
def test_backward_with_gradient(name: str) -> None:
    compare_training(perceptron, rows(), step=_backward_with(_GRADIENTS[name]), check_peak=False)


class _Labelled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = perceptron(2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.body(x)
        return nn.functional.cross_entropy(scores, labels.flatten()), scores


@pytest.mark.parametrize("expanded", [False, True])
def test_other_gradients_with_labels_that_are_a_slice(expanded: bool) -> None:
    """The program for the gradients that arrive is one of labels that are laid out as they were."""

    def inputs(iteration: int) -> Any:
        (x,), _ = rows()(iteration)
        table = torch.randint(32, (BATCH // 2, 3), generator=generator(iteration))
        return (x, table[:, :1].expand(-1, 2) if expanded else table[:, 1:]), {}

    compare_training(
        _Labelled, inputs, lambda result: result[1].square().mean(), budgets=("100%", "80%"), check_peak=False
    )


class _Linear(nn.Module):
    """Its output gradient is a parameter gradient or an input gradient as it stands."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(BATCH, 32))
        self.body = perceptron(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) + self.bias


@pytest.mark.parametrize("name", _GRADIENTS)
def test_output_gradient_that_becomes_a_parameter_gradient(name: str) -> None:
    """What the caller handed in must not end up as ``.grad``, where an optimizer would write to it."""

    def step(model: nn.Module, args: Any, kwargs: Any) -> Any:
        y = model(*args)
        given = _GRADIENTS[name]
        before = given.clone()
        y.backward(given)
        model.bias.grad.mul_(2)
        assert torch.equal(given, before), "the parameter's gradient shares memory with the caller's"
        return y

    options = {"budgets": ("60%",), "planner": QUICK}  # greedy meets that with some measured times only
    compare_training(_Linear, rows(requires_grad=True), step=step, check_peak=False, **options)


def test_autograd_grad() -> None:
    """``torch.autograd.grad`` leaves ``.grad`` alone and returns the same tensors."""

    def step(model: nn.Module, args: Any, kwargs: Any) -> Any:
        y = model(*args)
        wanted = (args[0], model[0].weight, model[-2].bias)
        return y, torch.autograd.grad(y.square().mean(), wanted)

    compare_training(perceptron, rows(requires_grad=True), step=step, check_peak=False)


def test_hooks_on_parameters_and_output() -> None:
    """Tensor hooks fire once per backward and see eager's gradients."""

    def step(model: nn.Module, args: Any, kwargs: Any) -> Any:
        seen: list[torch.Tensor] = []
        handles = [p.register_hook(lambda g: seen.append(g.clone())) for p in (model[0].weight, model[4].bias)]
        post = model[2].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        y = model(*args)
        y.register_hook(lambda g: g * 2)
        y.square().mean().backward()
        for handle in (*handles, post):
            handle.remove()
        assert len(seen) == 3
        return y, *sorted(seen, key=lambda g: g.numel())[:1]

    compare_training(perceptron, rows(), step=step, check_peak=False, budgets=("60%",))


class _Features(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = perceptron(2), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        features = self.body(x)
        return self.head(features), features, features[:4]


def _features(*, planned: bool) -> tuple[_Features, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    model, x = _Features(), rows()(0)[0]
    if planned:
        lowtide.rematerialize(model, x, budget="100%", planner="greedy")
    return model, model(*x)


@pytest.mark.parametrize("both", [False, True], ids=["scores", "both"])
@pytest.mark.parametrize("hook", [False, True], ids=["retain_grad", "hook"])
def test_hooks_on_a_result_that_another_is_computed_from(hook: bool, both: bool) -> None:
    """Inside the program its gradient is never there as a whole, which was left out in silence."""
    _, (scores, features, _) = _features(planned=True)
    _ = features.register_hook(lambda gradient: gradient * 2) if hook else features.retain_grad()
    loss = scores.square().mean() + (features.square().mean() if both else 0)
    with pytest.raises(lowtide.ExecutionError, match="other results are computed from it"):
        loss.backward()


@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("both", [False, True])
def test_the_gradient_of_a_result_that_another_is_computed_from(both: bool, more: bool, unused: bool) -> None:
    """``torch.autograd.grad`` got a part of it, or none."""
    model, (scores, features, _) = _features(planned=True)
    loss = scores.square().mean() + (features.square().mean() if both else 0)
    asked = [features, next(model.parameters())] if more else features
    with pytest.raises(lowtide.ExecutionError, match=r"torch\.autograd\.grad.*other results are computed from it"):
        torch.autograd.grad(loss, asked, allow_unused=unused, retain_graph=True)
    with pytest.raises(lowtide.ExecutionError, match=r"torch\.autograd\.grad"):
        loss.backward(inputs=[features])


def test_gradients_of_results_that_none_is_computed_from() -> None:
    found = []
    for planned in (True, False):
        model, (scores, features, part) = _features(planned=planned)
        loss = scores.square().mean() + features.square().mean() + part.square().mean()
        found.append(torch.autograd.grad(loss, [scores, part], retain_graph=True))
        found[-1] += torch.autograd.grad(loss, [scores, *model.parameters()])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


def test_hooks_on_results_that_none_is_computed_from() -> None:
    found = []
    for planned in (True, False):
        model, (scores, _, part) = _features(planned=planned)
        scores.register_hook(lambda gradient: gradient * 2)
        part.retain_grad()
        (scores.square().mean() + part.square().mean()).backward()
        found.append([part.grad, *(parameter.grad for parameter in model.parameters())])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


class _Centred(nn.Module):
    """A buffer moves, and a result comes of it for which no gradient is expected: beside a scalar, or in an attribute."""

    def __init__(self, left: bool) -> None:
        super().__init__()
        self.body, self.left = perceptron(2), left
        self.register_buffer("mean", torch.zeros(32))

    def forward(self, x: torch.Tensor) -> Any:
        y = self.body(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(y.mean(0), alpha=0.1)
        centred = (y - self.mean).square()
        if self.left:
            self.centred = centred
            return y
        return y.mean(), centred


@pytest.mark.parametrize("left", [False, True])
def test_a_result_of_a_buffer_that_moves(left: bool) -> None:
    """Its gradient comes though none is expected: the pass that runs again finds the buffer as it was."""

    def step(model: Any, args: Any, kwargs: Any) -> Any:
        result = model(*args)
        centred = model.centred if left else result[1]
        centred.mean().backward()
        return centred

    compare_training(lambda: _Centred(left), rows(), step=step, budgets=("100%", "80%"), check_peak=False)


def test_output_changed_in_place_afterwards() -> None:
    """The caller may scale the output in place before differentiating it, where eager allows it."""

    def step(model: nn.Module, args: Any, kwargs: Any) -> Any:
        y = model(*args)
        y.mul_(0.5)
        y.square().mean().backward()
        return y

    def network() -> nn.Module:
        return nn.Sequential(perceptron(4), nn.Linear(32, 8))

    compare_training(network, rows(), step=step, check_peak=False, budgets=("60%",))


class _Weighted(nn.Module):
    """Returns a result, and a scalar that is a part of the loss outside."""

    def __init__(self, beside: str) -> None:
        super().__init__()
        self.body, self.head, self.router = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.variance = nn.Parameter(torch.zeros(()))
        self.beside = beside

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.body(x).tanh()
        if self.beside == "parameter":
            return {"logits": self.head(hidden), "scalar": self.variance}
        if self.beside == "auxiliary":
            return {"logits": self.head(hidden), "scalar": self.router(hidden).softmax(-1).square().mean()}
        logits = self.head(hidden)
        if self.beside == "terms":
            terms = logits.square().mean(), self.router(hidden).abs().mean()
            return {"first": terms[0], "logits": logits, "loss": terms[0] + 0.1 * terms[1], "second": terms[1]}
        return {"logits": logits.softmax(-1), "scalar": logits.square().mean()}


@pytest.mark.parametrize(("beside", "expected"), [("parameter", 2), ("auxiliary", 2), ("loss", 1), ("terms", 1)])
def test_results_that_scalars_know_nothing_of(beside: str, expected: int) -> None:
    """The budget that is accepted at first suffices for the backward pass."""
    program = capture(_Weighted(beside), (torch.randn(4, 8),)).program
    assert sum(entry is not False for entry in program.mask) == expected


class _Complex(nn.Module):
    """A complex result, its parts apart in memory or not, that a lazy conjugation gives or not."""

    def __init__(self, conjugate: bool) -> None:
        super().__init__()
        self.body, self.conjugate = nn.Linear(8, 8), conjugate
        self.shift = nn.Parameter(torch.zeros(4, 4, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = torch.view_as_complex(self.body(x).unflatten(-1, (4, 2)))
        return (
            (1j * (parts + self.shift)).conj()
            if self.conjugate
            else torch.view_as_complex(torch.view_as_real(parts) * 2)
        )


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "expanded"])
@pytest.mark.parametrize("form", ["plain", "conjugate", "negative"])
@pytest.mark.parametrize("conjugate", [False, True])
def test_complex_gradients_that_are_to_be_read_otherwise(conjugate: bool, form: str, layout: str) -> None:
    """Some operators take no tensor whose numbers are to be read as their conjugates."""
    made = torch.randn(4, 4, dtype=torch.complex64, generator=generator(82))
    laid = {"contiguous": made, "transposed": made.T, "expanded": made[:1].expand(4, 4)}[layout]
    gradient = {"plain": laid, "conjugate": laid.conj(), "negative": torch._neg_view(laid)}[form]

    def step(model: nn.Module, args: Any, kwargs: Any) -> Any:
        y = model(*args)
        y.backward(gradient)
        return y

    compare_training(lambda: _Complex(conjugate), rows(4, 8), step=step, check_peak=False, budgets=("100%",))
