"""Weights that a forward pass moves and computes with: momentum encoders, moving averages, counters.

Copies of what they were would double them, so they are written at once where nothing but their new value is made of the first
one. Where anything else reads that, or a check may have the pass begin again, they are copied as any other buffer is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from tests.support.networks import WIDTH, perceptron, rows
from tests.support.records import copy_inputs
from tests.support.scarce import memory_of
from tests.support.training import QUICK, compare_training, make


class Average(nn.Module):
    """A network beside one with the averages of its weights, as methods with a momentum encoder have it."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = perceptron(), perceptron()
        self.teacher.requires_grad_(False)

    @torch.no_grad()
    def move(self) -> None:
        for new, old in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
            old.mul_(0.9).add_(new, alpha=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.move()
            target = self.teacher(x)
        return F.mse_loss(self.student(x), target)


class ByData(Average):
    """As MoCo has it: without a new version of the parameters."""

    @torch.no_grad()
    def move(self) -> None:
        for new, old in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
            old.data = old.data * 0.9 + new.data * 0.1


class Unseen(Average):
    """Parameters that require a gradient are written without a new version."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher.requires_grad_()


class Failing(Unseen):
    fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = super().forward(x)
        return loss + F.embedding(torch.tensor([9 if self.fails else 0]), self.student[0].weight[:4]).sum()


class ByState(Average):
    @torch.no_grad()
    def move(self) -> None:
        new = self.student.state_dict()
        for name, old in self.teacher.state_dict().items():
            old.copy_(old.lerp(new[name], 0.1))


class ByLists(Average):
    """As lightly has it."""

    @torch.no_grad()
    def move(self) -> None:
        old = list(self.teacher.parameters())
        torch._foreach_mul_(old, 0.9)
        torch._foreach_add_(old, list(self.student.parameters()), alpha=0.1)


class Twice(Average):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.move()
            first = self.teacher(x)
            self.move()
            second = self.teacher(-x)
        return F.mse_loss(self.student(x), first) + F.mse_loss(self.student(-x), second)


class WithQueue(Average):
    """The keys of earlier batches are read before those of this one take their places."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.randn(512, WIDTH))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = self.student(x)
        with torch.no_grad():
            self.move()
            keys = self.teacher(x)
        similar = query @ self.queue.clone().detach().t()
        place = int(self.place)
        self.queue[place : place + len(keys)] = keys
        self.place.add_(len(keys)).remainder_(512)
        return F.cross_entropy(torch.cat([(query * keys).sum(1, keepdim=True), similar], 1), torch.zeros(len(x)).long())


class FirstRead(Average):
    """The first value is read by others as well."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.teacher(x).detach()
        return super().forward(x) + F.mse_loss(self.student(x), before)


class Distance(Average):
    """Gradients are sums, of what is computed with the first value and with the new one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.teacher[0].weight.clone()
        loss, weight = super().forward(x), self.student[0].weight
        return loss + (weight - first).square().mean() + (weight - self.teacher[0].weight).square().mean()


class Through(Average):
    """The backward pass reads the new value."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.move()
        return self.teacher(self.student(x)).square().mean()


class Checked(Average):
    """A mask is asked after the weights have moved."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.move()
        with torch.no_grad():
            target = self.teacher(x)
        if (torch.rand(4) > 0.5).any():
            target = target * 0.5
        return F.mse_loss(self.student(x), target)


class Returned(Average):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return super().forward(x), self.teacher[0].weight, self.teacher[2].weight[:2]


class Diagnosed(Average):
    """Beside the loss there is a result that looks at the teacher; it could be differentiated, and is not."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            self.move()
            target = self.teacher(x)
        hidden = self.student(x)
        return hidden.square().mean(), hidden * target


class TwoLosses(Average):
    """Of which the second one, that looks at the teacher, is not differentiated."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.student(x).square().mean(), super().forward(x)


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = perceptron()
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        hidden = self.body(x)
        self.mean.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
        return ((hidden - self.mean) / self.steps.sqrt()).square().mean()


@pytest.mark.parametrize(
    "network",
    [
        Average,
        ByData,
        Unseen,
        ByState,
        ByLists,
        Twice,
        WithQueue,
        FirstRead,
        Distance,
        Through,
        Checked,
        Returned,
        Diagnosed,
        TwoLosses,
        Counted,
    ],
)
def test_training(network: Callable[[], nn.Module]) -> None:
    first = lambda result: result[0] if isinstance(result, tuple) else result  # noqa: E731
    compare_training(network, rows(64), first, budgets=("90%",), planner=QUICK)


@pytest.mark.parametrize("network", [Average, ByData, ByState, ByLists, Diagnosed])
def test_they_are_not_copied(network: Callable[[], nn.Module]) -> None:
    """What a plan takes on top of plain PyTorch's peak is far from their size."""
    args, kwargs = copy_inputs(rows(8)(0))
    plain = make(network)
    weights = sum(one.nbytes for one in plain.teacher.parameters())

    def step() -> None:
        result = plain(*args, **kwargs)
        (result[0] if isinstance(result, tuple) else result).backward()

    peak_bytes = lowtide.measure(step).peak_bytes
    plan = lowtide.plan(make(network), args, kwargs, budget="100%", planner="keep-all")
    assert plan.peak_bytes < peak_bytes + weights / 2


@pytest.mark.parametrize("network", [Average, ByData])
def test_a_pass_that_has_moved_them_does_not_begin_again(network: Callable[[], nn.Module]) -> None:
    """Memory runs out after it: moving them once more would be another step."""
    model = make(network)
    args, kwargs = copy_inputs(rows(64)(0))
    expected = copy.deepcopy(model)
    expected.move()
    lowtide.rematerialize(model, args, kwargs, budget="100%", planner=QUICK, planning="wait")
    (plan,) = lowtide.plans(model)
    with pytest.raises(RuntimeError, match="can't allocate memory") as raised, memory_of(plan.peak_bytes // 8):
        model(*args, **kwargs)
    assert "have been updated already" in raised.value.__notes__[0]
    pairs = zip(model.teacher.parameters(), expected.teacher.parameters(), strict=True)
    assert any(torch.equal(actual, once) for actual, once in pairs)


@pytest.mark.parametrize("network", [Average, ByData, Unseen, WithQueue])
def test_a_second_backward_pass(network: Callable[[], nn.Module]) -> None:
    def step(model: nn.Module, args: tuple, kwargs: dict) -> torch.Tensor:
        loss = model(*args, **kwargs)
        loss.backward(retain_graph=True)
        loss.backward()
        return loss

    compare_training(network, rows(64), step=step, budgets=("90%",), planner=QUICK, check_peak=False)


@pytest.mark.parametrize("network", [Average, ByData, Unseen])
def test_a_second_backward_pass_after_another_call(network: Callable[[], nn.Module]) -> None:
    """It would have to compute with weights that have moved on meanwhile."""
    model = make(network)
    args, kwargs = copy_inputs(rows(64)(0))
    lowtide.rematerialize(model, args, kwargs, budget="100%", planner=QUICK)
    loss = model(*args, **kwargs)
    loss.backward(retain_graph=True)
    model(*args, **kwargs).backward()
    with pytest.raises(lowtide.ExecutionError, match=r"teacher.* was modified in place"):
        loss.backward()


@pytest.mark.parametrize("network", [Average, ByData, Unseen, Distance, WithQueue])
def test_calls_that_wait_together(network: Callable[[], nn.Module]) -> None:
    """Of the first, gradients are to leave in terms when the second begins, for which it runs again."""

    def step(model: nn.Module, args: tuple, kwargs: dict) -> torch.Tensor:
        loss = model(*args, **kwargs) + model(-args[0])
        loss.backward()
        return loss

    compare_training(network, rows(64), step=step, budgets=("100%",), planner=QUICK, check_peak=False)


def test_a_second_backward_pass_after_a_call_that_failed() -> None:
    """It has moved the weights all the same."""
    model = make(Failing)
    args, kwargs = copy_inputs(rows(64)(0))
    lowtide.rematerialize(model, args, kwargs, budget="100%", planner=QUICK)
    loss = model(*args, **kwargs)
    loss.backward(retain_graph=True)
    index, model.fails = model.teacher[0].weight.clone(), True
    with pytest.raises(IndexError):
        model(*args, **kwargs)
    assert not torch.equal(index, model.teacher[0].weight)
    with pytest.raises(lowtide.ExecutionError, match=r"teacher.* was modified in place"):
        loss.backward()


@pytest.mark.parametrize("network", [Average, Unseen, Distance])
def test_calls_of_other_models_in_between(network: Callable[[], nn.Module]) -> None:
    other = make(lambda: perceptron())
    lowtide.rematerialize(other, rows(64)(0)[0], budget="100%", planner=QUICK)

    def step(model: nn.Module, args: tuple, kwargs: dict) -> torch.Tensor:
        loss = model(*args, **kwargs)
        loss.backward(retain_graph=True)
        other(*args).sum().backward()
        loss.backward()
        first = model(-args[0])
        other(*args).sum().backward()
        total = first + model(*args, **kwargs)
        total.backward()
        return total

    compare_training(network, rows(64), step=step, budgets=("100%",), planner=QUICK, check_peak=False)


class Handed(nn.Module):
    """A copy of a buffer that is written afterwards is computed with and returned, in another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.body = perceptron()
        self.register_buffer("queue", torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, before = self.body(x), self.queue.clone()
        loss = (hidden @ before.sin()).square().mean()
        self.queue.mul_(0.5).add_(hidden.detach()[:WIDTH])
        return loss, before.view(-1)


def test_a_copy_that_is_returned_is_the_caller_s() -> None:
    def step(model: nn.Module, args: tuple, kwargs: dict) -> torch.Tensor:
        loss, before = model(*args, **kwargs)
        loss.backward(retain_graph=True)
        before.zero_()
        loss.backward()
        return loss

    compare_training(Handed, rows(64), step=step, budgets=("100%",), planner=QUICK, check_peak=False)


def _view_of_the_former(model: Average, x: torch.Tensor) -> torch.Tensor:
    former = model.teacher[0].weight.data
    model.move()
    return x @ former


def _exchanged(model: Average, x: torch.Tensor) -> torch.Tensor:
    weight = model.teacher[0].weight
    former = weight.data
    weight.data = former * 0.5
    result = x @ weight
    weight.data = former
    return result


def _written_afterwards(model: Average, x: torch.Tensor) -> torch.Tensor:
    weight = model.teacher[0].weight
    value = weight.data * 0.5
    weight.data = value
    value.mul_(2)
    return x @ weight


class Assigned(ByData):
    def __init__(self, use: Callable[[Average, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.use = use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = self.use(self, x)
        return F.mse_loss(self.student(x), target)


@pytest.mark.parametrize("use", [_view_of_the_former, _exchanged, _written_afterwards])
def test_memory_that_is_not_the_parameter_s(use: Callable[[Average, torch.Tensor], torch.Tensor]) -> None:
    """``.data`` is assigned: views have the former memory, and the value is the new one."""
    plain = make(lambda: Assigned(use))
    planned = make(lambda: Assigned(use))
    args, kwargs = copy_inputs(rows()(0))
    lowtide.rematerialize(planned, args, kwargs, budget="100%", planner=QUICK)
    for _ in range(3):
        losses = [model(*args) for model in (plain, planned)]
        for loss in losses:
            loss.backward()
        assert torch.equal(*losses)
        assert all(map(torch.equal, plain.parameters(), planned.parameters()))


class OnLists(nn.Module):
    def __init__(self, name: str, arguments: Callable[[list[torch.Tensor]], tuple], gradients: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.name, self.arguments, self.gradients = name, arguments, gradients

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tensors = [layer(x).sigmoid() for layer in self.layers]
        with torch.set_grad_enabled(self.gradients):
            operands = tensors if self.gradients else [each.clone() for each in tensors]
            result = getattr(torch, f"_foreach_{self.name}")(operands, *self.arguments(operands))
        return sum(left.mul(right).square().mean() for left, right in zip(result, tensors, strict=True))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("mul", lambda _: (1.5,)),
        ("mul_", lambda tensors: (tensors[::-1],)),
        ("add", lambda tensors: ([each * 2 for each in tensors],)),
        ("add_", lambda _: ([0.1, 0.2, 0.3, 0.4],)),
        ("sub", lambda tensors: (tensors[::-1],)),
        ("mul", lambda tensors: (tensors[0].sum(),)),
        ("div", lambda _: ([1.0, 2.0, 3.0, 4.0],)),
        ("lerp", lambda tensors: (tensors[::-1], 0.3)),
        ("lerp", lambda tensors: (tensors[::-1], [0.1, 0.2, 0.3, 0.4])),
        ("lerp_", lambda tensors: ([each.detach() for each in tensors], [each.cos() for each in tensors])),
        ("maximum", lambda tensors: (tensors[::-1],)),
        ("maximum_", lambda tensors: (tensors[::-1],)),
        ("maximum", lambda _: (0.5,)),
        ("clamp_min", lambda _: (0.5,)),
        ("clamp_max_", lambda _: (0.5,)),
        ("copy_", lambda tensors: ([each * 3 for each in tensors],)),
        ("sqrt", lambda _: ()),
        ("reciprocal_", lambda _: ()),
        ("zero_", lambda _: ()),
        ("addcmul", lambda tensors: (tensors, tensors[::-1], 0.5)),
        ("norm", lambda _: ()),
    ],
)
def test_operators_on_lists(name: str, arguments: Callable[[list[torch.Tensor]], tuple]) -> None:
    compare_training(lambda: OnLists(name, arguments, False), rows(), budgets=("100%",), planner=QUICK)


@pytest.mark.parametrize("name", ["lerp", "mul", "sqrt", "norm"])
def test_gradients_of_operators_on_lists(name: str) -> None:
    """Their formulas are other ones than those of operators on tensors."""
    arguments = {"lerp": lambda tensors: (tensors[::-1], 0.3), "mul": lambda tensors: (tensors[::-1],)}.get(
        name, lambda _: ()
    )
    compare_training(lambda: OnLists(name, arguments, True), rows(), budgets=("100%",), planner=QUICK)
