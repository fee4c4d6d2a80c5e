"""Row: BatchNorm and other mutated buffers: updated once per forward, untouched by capture and profiling."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.ao import quantization

import lowtide
from tests.support.networks import WithLoss, generator, residual_blocks, rows
from tests.support.training import MINIMUM, compare_training, make, prepared


def _images(iteration: int) -> Any:
    return (torch.randn(4, 3, 16, 16, generator=generator(iteration)),), {}


def _convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))


def _convolutional(**options: Any) -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8, **options), nn.ReLU(inplace=True))
    return WithLoss(nn.Sequential(stem, residual_blocks(_convolution, 3), nn.Flatten(), nn.Linear(8 * 256, 5)))


def test_batch_norm() -> None:
    compare_training(_convolutional, _images, budgets=("100%", "70%", MINIMUM), quick=1)


def test_batch_norm_cumulative_average() -> None:
    """``momentum=None`` divides by ``num_batches_tracked``, which eager reads as a number: the first three calls are
    captured, the measured one too."""
    compare_training(lambda: _convolutional(momentum=None), _images, budgets=("60%",), iterations=2)


def test_batch_norm_without_statistics() -> None:
    compare_training(lambda: _convolutional(track_running_stats=False, affine=False), _images, budgets=("60%",))


def test_statistics_are_updated_once_per_forward() -> None:
    model = prepared(_convolutional, _images, MINIMUM)
    norm = model.body[0][1]
    assert norm.num_batches_tracked.item() == 0
    model(*_images(0)[0]).backward()
    model(*_images(1)[0])
    assert norm.num_batches_tracked.item() == 2


def test_versions_of_statistics_are_those_of_eager() -> None:
    """Whatever saved them must not take them for modified where eager does not."""
    plain, model = make(_convolutional), prepared(_convolutional, _images, MINIMUM)
    for _ in range(2):
        plain(*_images(0)[0])
        model(*_images(0)[0])
    versions = [buffer._version for buffer in plain.buffers()]
    assert [buffer._version for buffer in model.buffers()] == versions


class _Averaging(nn.Module):
    """Makes a buffer in its first call, in one of several ways, and computes from it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.linear, self.part = how, nn.Linear(16, 16), nn.Module()
        if how in ("declared", "declared, then registered"):
            self.register_buffer("kept", None)
        self.part.register_buffer("kept", None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        mean = y.detach().mean(0)
        if self.how == "of a submodule":
            self.part.kept = mean if self.part.kept is None else self.part.kept * 0.9 + mean
            return y - self.part.kept
        if getattr(self, "kept", None) is None:
            if self.how == "declared":
                self.kept = mean
            else:
                self.register_buffer("kept", mean, persistent=self.how != "not persistent")
        elif self.how == "growing":
            self.kept = torch.cat([self.kept, mean])
        else:
            self.kept = self.kept * 0.9 + mean
        return y - self.kept[-16:]


@pytest.mark.parametrize(
    "how", ["declared", "declared, then registered", "registered", "not persistent", "of a submodule", "growing"]
)
@pytest.mark.parametrize("expanded", [False, True])  # gradients in another layout than expected: another program
def test_buffers_that_the_first_call_makes(how: str, expanded: bool) -> None:
    torch.manual_seed(0)
    plain = _Averaging(how)
    batches = [torch.randn(8, 16) for _ in range(4)]
    model = lowtide.rematerialize(copy.deepcopy(plain), (batches[0],), budget="100%", planner="keep-all")
    for x in batches:
        for one in (plain, model):
            y = one(x)
            (y.sum() if expanded else y.square().mean()).backward()
        ours, theirs = dict(model.named_buffers()), dict(plain.named_buffers())
        assert ours.keys() == theirs.keys() == {"part.kept" if how == "of a submodule" else "kept"}
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        assert model.state_dict().keys() == plain.state_dict().keys()
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, its.grad)  # type: ignore[arg-type]


class _Registering(nn.Module):
    def __init__(self, does: Callable[[Any], None]) -> None:
        super().__init__()
        self.linear, self.does = nn.Linear(16, 16), does
        self.register_parameter("scale", None)
        self.register_buffer("shift", torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.does(self)
        return self.linear(x).square().mean()


def _make_parameter(model: Any) -> None:
    if model.scale is None:
        model.scale = nn.Parameter(torch.ones(16))


def _replace_parameter(model: Any) -> None:
    model.linear.bias = nn.Parameter(model.linear.bias.detach() * 0.9)


def _delete_buffer(model: Any) -> None:
    del model.shift


def _empty_buffer(model: Any) -> None:
    model.shift = None


@pytest.mark.parametrize(
    ("does", "said"),
    [
        (_make_parameter, r"makes or replaces parameters \(scale\)"),
        (_replace_parameter, r"makes or replaces parameters \(linear\.bias\)"),
        (_delete_buffer, r"takes away parameters or buffers \(shift\)"),
        (_empty_buffer, r"takes away parameters or buffers \(shift\)"),
    ],
)
def test_what_no_plan_can_register(does: Callable[[Any], None], said: str) -> None:
    model = _Registering(does)
    with pytest.raises(lowtide.CaptureError, match=said):
        lowtide.rematerialize(model, (torch.randn(8, 16),), budget="100%", on_capture_error="error")
    assert model.scale is None and model.shift is not None and type(model.linear.bias) is nn.Parameter


class _Leaky(nn.Module):
    """A neuron whose buffer is its state, with its history, from call to call; its class knows all neurons."""

    instances: ClassVar[list[nn.Module]] = []

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(0), persistent=False)
        self.decay = nn.Parameter(torch.tensor(0.9))
        self.instances.append(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.state.shape != x.shape:
            self.state = torch.zeros_like(x)
        self.state = self.decay * self.state + x.sigmoid()
        return self.state

    @classmethod
    def forget(cls) -> None:
        for neuron in cls.instances:
            neuron.state = torch.zeros_like(neuron.state)  # type: ignore[assignment, arg-type]


def _spiking() -> nn.Module:
    _Leaky.instances.clear()
    return nn.Sequential(nn.Linear(16, 24), _Leaky(), nn.Linear(24, 8), nn.Tanh(), _Leaky())


def _unrolled(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    _Leaky.forget()
    return torch.stack([model(x * step) for step in range(4)]).square().mean()


class _Unrolled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = _spiking()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _unrolled(self.inner, x)


@pytest.mark.parametrize("inside", [False, True])  # of the model, which is no single program then
def test_states_with_their_history(inside: bool) -> None:
    batches = [torch.randn(32, 16, generator=generator(number)) for number in range(4)]
    found = []
    for planned in (False, True):
        model = make(_Unrolled if inside else _spiking)
        if planned:
            lowtide.rematerialize(model, (batches[0],), budget="100%")
        for x in batches:
            loss = model(x) if inside else _unrolled(model, x)
            loss.backward()
            states = [(one.clone(), torch.tensor(one.requires_grad)) for one in model.buffers()]
            gradients = [one.grad.clone() for one in model.parameters() if one.grad is not None]
            found.append([loss.detach(), *itertools.chain(*states), *gradients])
    for eager, ours in zip(found[:4], found[4:], strict=True):
        assert all(map(torch.equal, eager, ours)) and len(eager) == len(ours)


class _Truncated(nn.Module):
    """Goes on from the state that the call before left with its history, and leaves that behind."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.cell, self.head = how, nn.Linear(16, 16), nn.Linear(16, 4)
        self.state: torch.Tensor
        if how == "attribute":
            self.state = torch.zeros(8, 16)
        else:
            self.register_buffer("state", torch.zeros(8, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros_like(self.state) if self.how == "begun again" else self.state.detach()
        losses = []
        for _ in range(3):
            state = torch.tanh(self.cell(x + state))
            losses.append(self.head(state).square().mean())
        self.state = state
        return torch.stack(losses).sum()


@pytest.mark.parametrize("how", ["attribute", "buffer", "begun again"])
def test_states_without_their_history(how: str) -> None:
    plain = make(lambda: _Truncated(how))
    batches = [torch.randn(8, 16, generator=generator(number)) for number in range(4)]
    model = lowtide.rematerialize(copy.deepcopy(plain), (batches[0],), budget="100%")
    for x in batches:
        for one in (plain, model):
            one.zero_grad()
            one(x).backward()
        for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine.grad, its.grad)  # type: ignore[arg-type]
        assert torch.equal(model.state, plain.state) and model.state.requires_grad  # type: ignore[arg-type, union-attr]


class _Counters(nn.Module):
    """Buffers written in every way: in place, by assignment, by an exponential average read again later."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(32))
        self.register_buffer("last", torch.zeros(32), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.body(x * (1 + self.average))
        with torch.no_grad():
            self.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
        self.last = x.detach()[0].clone()
        return x * self.average


def test_mutated_and_reassigned_buffers() -> None:
    compare_training(lambda: WithLoss(_Counters()), rows(), budgets=("70%", MINIMUM), quick=0)


def test_spectral_norm() -> None:
    """Power iteration writes its vectors in place at every forward."""

    def network() -> nn.Module:
        layers = (nn.utils.parametrizations.spectral_norm(nn.Linear(32, 32)) for _ in range(3))
        return WithLoss(nn.Sequential(*(nn.Sequential(layer, nn.GELU()) for layer in layers)))

    compare_training(network, rows(), budgets=("60%",))


@pytest.mark.filterwarnings("ignore")  # PyTorch's own, of its quantisation
def test_statistics_that_are_fitted_to_their_input() -> None:
    """Of quantisation: without a shape until the first call, then one for each channel."""
    observer = quantization.MovingAveragePerChannelMinMaxObserver
    scheme = {"dtype": torch.qint8, "qscheme": torch.per_channel_symmetric}
    torch.manual_seed(0)
    linear = nn.Linear(8, 8)
    nn.utils.parametrize.register_parametrization(
        linear,
        "weight",
        quantization.FusedMovingAvgObsFakeQuantize(observer, -128, 127, **scheme),
    )
    plain, x = WithLoss(linear), torch.randn(4, 8)
    planned = copy.deepcopy(plain)
    lowtide.rematerialize(planned, (x,), budget="100%", planner="keep-all", on_capture_error="error")
    for _ in range(3):
        losses = [model(x) for model in (plain, planned)]
        for model, loss in zip((plain, planned), losses, strict=True):
            loss.backward()
            torch.optim.SGD(model.parameters(), 0.1).step()
        assert torch.equal(*losses)
        assert all(map(torch.equal, plain.buffers(), planned.buffers()))
