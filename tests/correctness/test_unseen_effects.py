"""What a forward pass does beside computing its result: refused where planned calls would leave it out."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import lowtide
from lowtide.capture import capture
from lowtide.capture.python_state.guards.external_effects import ExternalEffects
from tests.support.training import QUICK, make
from tests.support.wide import pairs


class _Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)


class _Assigns(_Linear):
    """What two have in common is written through each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.other.weight.data = self.linear.weight.data
        return self.linear(self.other(x)).square().mean()


class _AssignsTransposed(_Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.linear.weight.data = self.linear.weight.data.t()
        return self.linear(x).square().mean()


class _Keeps(_Linear):
    """As graph networks do with their batches."""

    def forward(self, batch: Any, seen: Any) -> torch.Tensor:
        seen.calls = getattr(seen, "calls", 0) + 1
        batch.h = self.linear(batch.x)
        return batch.h.square().mean()


class _Leaves(_Linear):
    """In an object of the caller's that holds no tensors yet."""

    def forward(self, x: torch.Tensor, seen: Any) -> torch.Tensor:
        seen.h = self.linear(x)
        return seen.h.square().mean()


class _Asks(_Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).square().mean() + self.linear(x.requires_grad_()).mean()


class _Averages(_Linear):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        self.mean.lerp_(x.mean(0), 0.1)
        return x.square().mean()


_SCALE = nn.Parameter(torch.ones(8))
_MEAN = torch.zeros(8)


class _GlobalParameter(_Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * _SCALE).square().mean()


class _WritesInput(_Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(F.relu_(x)).square().mean()


class _SharedBuffers(_Linear):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("whole", torch.zeros(16))
        self.register_buffer("first", self.whole[:8])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.whole += 1
        return (self.linear(x) * self.first).square().mean()


class _SharedArguments(_Linear):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return (self.linear(x) + y).square().mean()


class _Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8, sparse=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embedding(tokens).square().mean()


class _SparseFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(10, 8))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(tokens, self.table, sparse=True).square().mean()


class _DrawsByItself(_Linear):
    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.generator = generator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * float(self.generator.random())).square().mean()


class _Seeds(_Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(5)
        return F.dropout(self.linear(x)).square().mean()


class _Forks(_Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            return F.dropout(self.linear(x)).square().mean()


class _SetsState(_Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.set_rng_state(torch.get_rng_state())
        return F.dropout(self.linear(x)).square().mean()


class _Lengths(_Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.ctc_loss(self.linear(x)[:, None].log_softmax(-1), torch.ones(1, 2, dtype=torch.long), [len(x)], [2])


class _FreshGenerator(_Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * np.random.default_rng().random()).square().mean()


class _GlobalMean(_Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _MEAN.add_(1)
        return (self.linear(x) - _MEAN).square().mean()


class _Reads(_Linear):
    def __init__(self, read: Callable[[torch.Tensor, Any], Any]) -> None:
        super().__init__()
        self.read = read
        self.table = torch.full((4,), 3.0)
        self.register_buffer("numbers", torch.tensor([3, 1]))
        self.linear.weight.scale = 2.0  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * self.read(x, self)).square().mean()


class _Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.LazyLinear(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).square().mean()


def _rows() -> torch.Tensor:
    return torch.randn(4, 8)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of what a hook computed
@pytest.mark.parametrize(
    ("make", "sample", "said"),
    [
        (_Assigns, lambda: (_rows(),), r"assigns to \.data"),
        (_AssignsTransposed, lambda: (_rows(),), r"assigns to \.data"),
        (_Keeps, lambda: (SimpleNamespace(x=_rows()), SimpleNamespace()), "adds to a list, a dict or an object"),
        (_Leaves, lambda: (_rows(), SimpleNamespace()), "adds to a list, a dict or an object"),
        (_Asks, lambda: (_rows(),), r"requires_grad_\(\) on .* that it has read before"),
        (_Averages, lambda: (_rows(),), r"into a buffer .* Write x.detach\(\)"),
        (_GlobalParameter, lambda: (_rows(),), "none of its parameters"),
        (_WritesInput, lambda: (_rows().requires_grad_() * 1,), "writes in place"),
        (_SharedBuffers, lambda: (_rows(),), "several buffers or arguments share"),
        (_SharedArguments, lambda: (lambda x: (x, x[:]))(_rows()), "several buffers or arguments share"),
        (_Sparse, lambda: (torch.arange(6),), "sparse=False"),
        (_SparseFunction, lambda: (torch.arange(6),), "makes a sparse tensor .*sparse=False"),
        (lambda: _DrawsByItself(random.Random(0)), lambda: (_rows(),), "a random generator of its own"),
        (lambda: _DrawsByItself(np.random.default_rng(0)), lambda: (_rows(),), "a random generator of its own"),
        (lambda: _DrawsByItself(np.random.RandomState(0)), lambda: (_rows(),), "a random generator of its own"),
        (lambda: _DrawsByItself(SimpleNamespace(random=random.Random(0).random)), lambda: (_rows(),), "of its own"),
        (
            lambda: _DrawsByItself(SimpleNamespace(random=np.random.default_rng(0).random)),
            lambda: (_rows(),),
            "of its own",
        ),
        (_Seeds, lambda: (_rows(),), "calls torch.manual_seed"),
        (_Forks, lambda: (_rows(),), "calls torch.set_rng_state"),
        (_SetsState, lambda: (_rows(),), "calls torch.set_rng_state"),
        (_Lengths, lambda: (_rows(),), "lengths are given as lists"),
        (_FreshGenerator, lambda: (_rows(),), "default_rng.. without a seed"),
        (_GlobalMean, lambda: (_rows(),), "register_buffer"),
        (_Lazy, lambda: (_rows(),), "call the model once"),
        (lambda: _Reads(lambda x, m: torch.initial_seed() % 7), lambda: (_rows(),), "calls torch.initial_seed"),
        (lambda: _Reads(lambda x, m: torch.get_rng_state()[0]), lambda: (_rows(),), "calls torch.get_rng_state"),
        (
            lambda: _Reads(lambda x, m: 1 + bool(setattr(m.linear.weight, "grad", None))),
            lambda: (_rows(),),
            r"sets \.grad of",
        ),
        (lambda: _Reads(lambda x, m: float(x.numpy()[0, 0])), lambda: (_rows(),), "an array of NumPy's"),
    ],
)
def test_refused(make: Callable[[], nn.Module], sample: Callable[[], tuple[Any, ...]], said: str) -> None:
    model = make()
    with pytest.raises(lowtide.CaptureError, match=said):
        lowtide.rematerialize(model, sample(), budget="100%", planner="greedy", on_capture_error="error")
    if make is not _Lazy:
        assert torch.isfinite(_loss(model(*sample())))


def test_parameters_get_their_shapes_in_the_first_call() -> None:
    """Which runs without a plan, where no sample was given, and draws as in eager; the next one is planned."""
    found = []
    for planned in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.LazyLinear(4), nn.Tanh(), _Lazy())
        if planned:
            lowtide.rematerialize(model, budget="100%", planner="greedy")
        losses = []
        for _ in range(3):
            losses.append(model(_rows()))
            losses[-1].backward()
        found.append([*losses, *(p.grad for p in model.parameters()), torch.get_rng_state()])
        assert not planned or len(lowtide.plans(model)) == 1
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_tensors_of_others_stay_as_they_were() -> None:
    before = _MEAN.clone()
    with pytest.raises(lowtide.CaptureError, match=r"test_unseen_effects\.py"):
        lowtide.rematerialize(_GlobalMean(), (_rows(),), budget="100%", planner="greedy", on_capture_error="error")
    assert torch.equal(_MEAN, before)


def test_objects_of_the_caller_stay_as_they_were() -> None:
    seen = SimpleNamespace(other=1)
    with pytest.raises(lowtide.CaptureError, match="an object among its arguments"):
        lowtide.rematerialize(_Leaves(), (_rows(), seen), budget="100%", planner="greedy", on_capture_error="error")
    assert vars(seen) == {"other": 1}


def _loss(result: Any) -> torch.Tensor:
    loss: torch.Tensor = result["loss"] if isinstance(result, dict) else result
    return loss


class _Takes(_Linear):
    def forward(self, batch: dict[str, torch.Tensor], more: list[torch.Tensor]) -> torch.Tensor:
        target = batch.pop("target") + more.pop()
        return (self.linear(batch["x"]) - target).square().mean()


def test_what_is_taken_out_of_arguments_is_of_no_consequence() -> None:
    model, x, target = _Takes(), _rows(), _rows()
    expected = model({"x": x, "target": target}, [x, x]).detach()
    lowtide.rematerialize(model, ({"x": x, "target": target}, [x, x]), budget="100%", planner="greedy")
    assert torch.equal(model({"x": x, "target": target}, [x, x]), expected)


class _Losses(nn.Module):
    """A reconstruction and a commitment loss, as in a VQ-VAE."""

    def __init__(self, loss: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(16, 16), nn.Linear(16, 16)
        self.loss = loss

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        code = torch.sigmoid(self.encode(x))
        target = torch.tanh(code).abs().detach()
        return self.loss(torch.sigmoid(self.decode(code)), target) * 0.5 + 0.25 * self.loss(code, target)


_OWNING = F.mse_loss, F.smooth_l1_loss, F.binary_cross_entropy, F.soft_margin_loss, F.huber_loss, F.l1_loss


@pytest.mark.parametrize(("loss", "budget"), pairs(_OWNING, ("100%", "90%")))
def test_losses_that_own_more_than_their_element(loss: Callable[..., torch.Tensor], budget: str) -> None:
    """The kernels leave a mean at the start of a storage of all elements, which nothing else must take over."""
    model, x = _Losses(loss), torch.rand(2048, 16)
    model(x).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    lowtide.rematerialize(model, (x,), budget=budget, planner=QUICK)
    (plan,) = lowtide.plans(model)
    measured = lowtide.measure(lambda: model(x).backward()).peak_bytes
    assert measured == plan.peak_bytes <= plan.budget_bytes
    assert all(map(torch.equal, (p.grad for p in model.parameters() if p.grad is not None), expected))


_NORMS = (lambda: nn.LayerNorm(16), lambda: nn.GroupNorm(4, 16), lambda: nn.BatchNorm1d(16))


@pytest.mark.parametrize(("norm", "dtype"), pairs(_NORMS, (torch.bfloat16, torch.float16)))
def test_statistics_of_norms_under_autocast(norm: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    """Of the weight's type, though PyTorch's own shape functions say the input's."""
    model, x = nn.Sequential(nn.Linear(16, 16), norm(), nn.Tanh(), nn.Linear(16, 16)), torch.randn(64, 16)

    def step() -> torch.Tensor:
        with torch.autocast("cpu", dtype):
            loss = model(x).float().square().mean()
        loss.backward()
        return loss.detach()

    loss = step()
    expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    with torch.autocast("cpu", dtype):
        program = capture(model, (x,)).program
    normed = next(op for op in program.graph.ops if "_norm" in op.target and "backward" not in op.target)
    assert [program.metas[value].dtype for value in normed.outputs[:3]] == [dtype, torch.float32, torch.float32]
    with torch.autocast("cpu", dtype):
        lowtide.rematerialize(model, (x,), budget="100%", planner="greedy")
    assert torch.equal(step(), loss)
    assert all(map(torch.equal, (p.grad for p in model.parameters() if p.grad is not None), expected))


class _Ranges(_Linear):
    """Marks a range for the profiler, and holds a module of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.functions = F

    @functools.cached_property
    def scale(self) -> float:
        return 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.profiler.record_function("linear"):
            return self.functions.relu(self.linear(x)).square().mean() * self.scale


def test_ranges_for_the_profiler_and_python_modules() -> None:
    model, x = _Ranges(), _rows()
    expected = model(x).detach()
    lowtide.rematerialize(model, (x,), budget="100%", planner="greedy")
    assert torch.equal(model(x), expected)
    model.step = 1
    assert torch.equal(model(x), expected)
    assert len(lowtide.plans(model)) == 1


class _Likelihood(_Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normal = torch.distributions.Normal(self.linear(x), 1.0)
        return -normal.log_prob(x).mean() + torch.distributions.kl_divergence(normal, normal).mean()


def test_distributions_do_not_look_at_values() -> None:
    model, x = _Likelihood(), _rows()
    checks = torch.distributions.Distribution._validate_args  # type: ignore[attr-defined]  # Dynamo switches them off
    expected = model(x).detach()
    lowtide.rematerialize(model, (x,), budget="100%", planner="greedy")
    assert torch.equal(model(x), expected)
    assert torch.distributions.Distribution._validate_args is checks  # type: ignore[attr-defined]


class _Plain(_Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).square().mean()


class _Collector:
    def __init__(self) -> None:
        self.features: dict[str, torch.Tensor] = {}

    def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.features["last"] = output

    def take(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.features["last"] = output


_KEPT: list[torch.Tensor] = []


def _keep(output: torch.Tensor) -> None:
    _KEPT.append(output)


def _collecting(kind: str) -> tuple[Callable[..., None], Callable[[], Any]]:
    """A hook, and what it collected."""
    collector, collected = _Collector(), []
    hooks: dict[str, tuple[Callable[..., None], Callable[[], Any]]] = {
        "closure": (lambda module, args, output: collected.append(output), lambda: collected),
        "callable": (collector, lambda: list(collector.features)),
        "method": (collector.take, lambda: list(collector.features)),
        "default": (lambda module, args, output, into=collected: into.append(output), lambda: collected),
        "partial": (
            functools.partial(lambda into, module, args, output: into.append(output), collected),
            lambda: collected,
        ),
        "global": (lambda module, args, output: _keep(output), lambda: _KEPT),
    }
    return hooks[kind]


@pytest.mark.parametrize("kind", ["closure", "callable", "method", "default", "partial", "global"])
def test_hooks_that_collect(kind: str) -> None:
    """Refused, and nothing of the trace is left with the user."""
    hook, collected = _collecting(kind)
    model = _Plain()
    model.linear.register_forward_hook(hook)
    with pytest.raises(lowtide.CaptureError, match="a hook of a submodule, keeps tensors outside of the model"):
        lowtide.rematerialize(model, (_rows(),), budget="100%", planner="greedy", on_capture_error="error")
    assert not collected()


def test_hooks_that_keep_in_attributes_or_count() -> None:
    """Attributes are written in planned calls; what is no tensor is of no consequence."""
    shapes: list[Any] = []

    def hooked() -> nn.Module:
        model = _Plain()
        model.linear.register_forward_hook(lambda module, args, output: setattr(module, "kept", output))
        model.linear.register_forward_hook(lambda module, args, output: shapes.append(output.shape))
        return model

    plain, planned = (make(hooked) for _ in range(2))
    lowtide.rematerialize(planned, (_rows(),), budget="100%", planner="keep-all")
    assert not shapes
    x = _rows()
    for model in (plain, planned):
        model(x).backward()
    assert torch.equal(plain.linear.kept, planned.linear.kept)


def test_a_part_that_is_planned_as_well() -> None:
    """After the whole: the whole's plan has it in it."""
    model, other = (make(lambda: nn.Sequential(_Linear().linear, nn.Tanh(), nn.Linear(8, 8))) for _ in range(2))
    lowtide.rematerialize(model, (_rows(),), budget="100%", planner="keep-all")
    lowtide.rematerialize(model[2], budget="100%", planner="keep-all")
    for rows in (_rows(), _rows()[:3]):
        for each in (model, other):
            each.zero_grad()
            each(rows).square().sum().backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_numbers_among_the_arguments_that_are_read() -> None:
    """Each value is a program, as with numbers that are no tensors."""

    class Scaled(_Linear):
        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return (self.linear(x) * scale.item()).square().mean()

    plain, planned = (make(Scaled) for _ in range(2))
    lowtide.rematerialize(planned, budget="100%", planner="keep-all")
    x = _rows()
    for scale in (0.5, 0.5, 2.0, 0.5):
        for model in (plain, planned):
            model.zero_grad()
            model(x, torch.tensor(scale)).backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), planned.parameters(), strict=True))
    assert len(lowtide.plans(planned)) == 2


@pytest.mark.parametrize(
    "read",
    [
        lambda x, m: float(m.table.numpy()[0]),
        lambda x, m: float(np.asarray(m.table)[1]),
        lambda x, m: int(m.numbers.numpy()[0]),
        lambda x, m: len(str(m.numbers)),
        lambda x, m: len(f"{m.numbers}") + len(f"{m.numbers[0]}"),
        lambda x, m: len(repr(m.table)),
        lambda x, m: m.linear.weight.scale,
        lambda x, m: 1 + len(m.linear._forward_hooks),
        lambda x, m: 1 + torch.is_anomaly_enabled(),
    ],
)
def test_what_python_reads_of_tensors_and_modules(read: Callable[[torch.Tensor, Any], Any]) -> None:
    """As in eager, and not as of the tensors and modules that are traced."""
    plain, planned = (make(lambda: _Reads(read)) for _ in range(2))
    x = _rows()
    lowtide.rematerialize(planned, (x,), budget="100%", planner="keep-all")
    for model in (plain, planned):
        model(x).backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), planned.parameters(), strict=True))


class _Conjugates(_Linear):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z = torch.fft.fft(x)
        return z.conj(), z, self.linear(x)


def test_a_lazy_conjugate_beside_its_base() -> None:
    """A write into the one is seen in the other, though neither has a gradient."""
    model, x = make(_Conjugates), _rows()
    lowtide.rematerialize(model, (x,), budget="100%", planner="keep-all")
    conjugate, base, result = model(x)
    assert torch.equal(conjugate, torch.fft.fft(x).conj()) and conjugate.is_conj() and not base.requires_grad
    base.mul_(2)
    assert torch.equal(conjugate, 2 * torch.fft.fft(x).conj())
    result.sum().backward()


def _of_kind(kinds: set[int], y: torch.Tensor) -> torch.Tensor:
    return (y * len(kinds)).square().mean()


class _Kinds(_Linear):
    """Has a set, in a partial function."""

    def __init__(self) -> None:
        super().__init__()
        self.of_kind = functools.partial(_of_kind, set([16, 1, 2, 3, 4]))  # noqa: C405 (copies have another order)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.of_kind(self.linear(x))


def test_a_set_whose_copies_have_another_order() -> None:
    model, x = make(_Kinds), _rows()
    assert [*model.of_kind.args[0]] != [*copy.copy(model.of_kind.args[0])]
    lowtide.rematerialize(model, (x,), budget="100%", planner="keep-all", on_capture_error="error")
    assert torch.equal(model(x), _Kinds.forward(model, x))


def test_what_stands_for_tensors_keeps_its_own_state() -> None:
    """A trace's fake tensors lead to what numbers them, which is none of what a pass leaves outside of its model."""
    with FakeTensorMode() as mode:
        model = nn.Linear(2, 2)
    numbers = mode.fake_tensor_converter.meta_converter.describer
    with ExternalEffects(model, ()):
        mode.from_tensor(torch.ones(3))
        latest = numbers.next_tensor_id
    assert latest > 0
    assert numbers.next_tensor_id == latest
