"""Rows: ``eval()``, ``no_grad``, ``inference_mode``; autocast and bfloat16 parameters."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import lowtide
from tests.support.networks import WithLoss, perceptron, rows
from tests.support.training import MINIMUM, compare_training, make, prepared


def _network() -> nn.Module:
    return nn.Sequential(perceptron(3), nn.BatchNorm1d(32), nn.Dropout(0.2), perceptron(3))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_without_gradients(mode: Callable[[], Any], training: bool) -> None:
    plain, ours = make(_network).train(training), prepared(_network, rows(), "60%").train(training)
    (x,), _ = rows()(0)
    results = []
    for model in (plain, ours):
        torch.manual_seed(3)
        with mode():
            results.append(model(x))
    assert torch.equal(*results)
    assert results[1].requires_grad is False
    assert results[0].is_inference() == results[1].is_inference()
    for theirs, mine in zip(plain.buffers(), ours.buffers(), strict=True):
        assert torch.equal(theirs, mine)


def test_eval_mode_trains_exactly() -> None:
    """Gradients in eval mode (fine tuning with frozen statistics) are another signature."""

    def step(model: nn.Module, args: Any, kwargs: Any) -> Any:
        step.calls += 1
        model.train(step.calls % 2 == 1)
        y = model(*args)
        y.square().mean().backward()
        return y

    step.calls = 0

    compare_training(_network, rows(), step=step, iterations=4, check_peak=False)


def test_validation_between_training_steps() -> None:
    def step(model: nn.Module, args: Any, kwargs: Any) -> Any:
        y = model(*args)
        y.square().mean().backward()
        model.eval()
        with torch.no_grad():
            validation = model(args[0] + 1)
        model.train()
        return y, validation

    compare_training(_network, rows(), step=step, check_peak=False, budgets=("60%",))


def test_set_grad_enabled_false_inside_the_model() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen, self.body = perceptron(3), perceptron(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                features = self.frozen(x)
            return self.body(features).square().mean()

    compare_training(Partly, rows())


def _autocast_step(dtype: torch.dtype) -> Callable[..., Any]:
    def step(model: nn.Module, args: Any, kwargs: Any) -> Any:
        with torch.autocast("cpu", dtype=dtype):
            y = model(*args)
            loss = y.float().square().mean()
        loss.backward()
        return y

    return step


def _prepare_under_autocast(dtype: torch.dtype) -> Callable[..., Any]:
    def prepare(model: nn.Module, args: Any, kwargs: Any, *, budget: Any) -> nn.Module:
        with torch.autocast("cpu", dtype=dtype):
            return lowtide.rematerialize(model, args, kwargs, budget=budget, planner="greedy")

    return prepare


def _attention() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
    return nn.Sequential(
        nn.Linear(32, 32), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.LayerNorm(32)
    )


def _sequences(iteration: int) -> Any:
    return (rows()(iteration)[0][0].view(16, 16, 32),), {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_autocast_around_the_call(dtype: torch.dtype) -> None:
    prepare = _prepare_under_autocast(dtype)
    compare_training(_attention, _sequences, step=_autocast_step(dtype), prepare=prepare)


def test_autocast_differs_from_the_sample() -> None:
    """Planned without autocast, called with it: another signature, exact."""
    compare_training(_attention, _sequences, step=_autocast_step(torch.bfloat16), check_peak=False, budgets=("60%",))


class _Island(nn.Module):
    """Whose last layer is computed in float32 whatever is around it."""

    def __init__(self, island: bool) -> None:
        super().__init__()
        self.first, self.last, self.island = nn.Linear(8, 8), nn.Linear(8, 8), island

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        if not self.island:
            return self.last(h)
        with torch.autocast("cpu", enabled=False):
            return self.last(h.float())


@pytest.mark.parametrize("island", [False, True], ids=["all under autocast", "a part in float32"])
def test_a_backward_pass_under_autocast(island: bool) -> None:
    """Equal where nothing of it would be cast, refused where plain PyTorch multiplies in less than float32."""
    torch.manual_seed(0)
    model, x = _Island(island), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    lowtide.rematerialize(model, (x,), budget="100%", planner="keep-all")
    for one in (plain, model):
        refused = (
            pytest.raises(lowtide.ExecutionError, match="under autocast") if one is model and island else nullcontext()
        )
        with torch.autocast("cpu", torch.bfloat16):
            loss = one(x).float().square().mean()
            with refused:
                loss.backward()
    if not island:
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)


def test_another_default_device() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    lowtide.rematerialize(model, (x,), budget="100%", planner="keep-all")
    for one in (plain, model):
        with torch.device("meta"):
            one(x).square().mean().backward()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_which_kernel_computes_attention() -> None:
    """Chosen when the model is traced, by flags that a caller may set for a while."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(32, 96)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query, key, value = self.project(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    x = torch.randn(2, 40, 32)
    plain, ours = make(Attention), make(Attention)
    lowtide.rematerialize(ours, (x,), budget="100%", planner="greedy")
    for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        for model in (plain, ours):
            model.zero_grad()
            with sdpa_kernel(backend):
                model(x).square().sum().backward()
        assert torch.equal(ours.project.weight.grad, plain.project.weight.grad)


def test_autocast_inside_the_model() -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = perceptron(4), nn.Linear(32, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = self.body(x)
            with torch.autocast("cpu", enabled=False):
                return self.head(y.float()).square().mean()

    compare_training(Inside, rows(), budgets=("70%", MINIMUM), quick=0)


def test_arguments_that_are_leaves_and_others_under_autocast() -> None:
    """Only leaves are cast once."""

    class Arguments(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return (self.layer(y) + x @ y.t() @ y).float().square().mean()

    torch.manual_seed(0)
    plain = Arguments()
    planned = copy.deepcopy(plain)
    lowtide.rematerialize(planned, budget="100%", planner="keep-all")
    for iteration in range(4):
        found = []
        for model in (plain, planned):
            torch.manual_seed(iteration)
            x, leaf = torch.randn(32, 32), torch.randn(32, 32, requires_grad=True)
            model.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(x, leaf if iteration % 2 else leaf * 1.5)
            loss.backward()
            found.append([loss.detach(), leaf.grad, *(p.grad for p in model.parameters())])
        assert all(map(torch.equal, *found))


def test_another_thread_ends_its_autocast_meanwhile() -> None:
    """Its casts are forgotten, as they have to be."""
    seen, end = os.pipe()  # a list would be put back: a capture is no call

    class Waiting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            thread = threading.Thread(target=_updated_between, args=(end,))
            thread.start()
            thread.join()
            return self.layer(x).square().mean()

    lowtide.rematerialize(Waiting(), (torch.randn(2, 8),), budget="100%", planner="keep-all")
    os.close(end)
    with open(seen, "rb") as answers:
        assert set(answers.read()) == {ord("1")}


def _updated_between(end: int) -> None:
    weight, x = torch.ones(8, 8, requires_grad=True), torch.ones(2, 8)
    results = []
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            results.append((x @ weight).detach())
        with torch.no_grad():
            weight.add_(1)
    os.write(end, b"0" if torch.equal(*results) else b"1")


class _Shared(nn.Module):
    """``use(self, x)`` uses parameters several times."""

    def __init__(self, use: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(32, 32), nn.Linear(32, 32)
        self.cell, self.table = nn.GRUCell(32, 32), nn.Embedding(64, 32)
        self.use = use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.use(self, x).float()


def _layers(model: Any, x: torch.Tensor) -> torch.Tensor:
    for _ in range(4):
        x = torch.tanh(model.layer(x)) + x
    return x


def _recurrent(model: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = torch.zeros_like(x)
    for step in range(5):
        hidden = model.cell(x * step, hidden)
    return hidden


def _tied(model: Any, x: torch.Tensor) -> torch.Tensor:
    """In full precision too: where the table is looked up, and in its norm."""
    h = model.layer(model.table(torch.arange(len(x)) % 64) + x)
    weight = model.table.weight
    return F.linear(h, weight).float() + F.linear(model.layer(h), weight) + weight.square().sum()


def _two_periods(model: Any, x: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = model.layer(model.layer(x)).float()
    return x


def _not_kept(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        return model.layer(model.layer(x))  # type: ignore[no-any-return]


def _own_casts(model: Any, x: torch.Tensor) -> torch.Tensor:
    one, two = model.layer.weight.to(torch.bfloat16), model.layer.weight.bfloat16()
    return F.linear(x, one) + F.linear(x, two) + model.layer(x) + model.layer(x * 2)


def _also_without_gradients(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        target = model.other(model.layer(x))
    return (model.layer(model.layer(x)) - target) * model.other(x)


class _Product(torch.autograd.Function):
    """An operator of the user's under mixed precision."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), x.t() @ gradient


def _own_functions(model: Any, x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = _Product.apply(x, model.layer.weight)
    return x


def _own_types(model: Any, x: torch.Tensor) -> torch.Tensor:
    weight = model.layer.weight
    mixed = [F.softmax(weight, -1, dtype=torch.bfloat16) * factor for factor in (1, 2, 3)]
    return sum(x @ one for one in mixed)  # type: ignore[return-value]


@pytest.mark.parametrize("budgets", [("100%",), ("85%",)], ids=["100", "85"])
@pytest.mark.parametrize(
    "use",
    [
        _layers,
        _recurrent,
        _tied,
        _two_periods,
        _not_kept,
        _own_casts,
        _also_without_gradients,
        _own_functions,
        _own_types,
    ],
    ids=lambda use: use.__name__,
)
def test_parameters_used_twice_under_autocast(use: Callable[..., torch.Tensor], budgets: tuple[str, ...]) -> None:
    """Cast once, and their gradients are summed in the low precision, until the outermost autocast ends."""
    inside = use in (_two_periods, _not_kept)
    options: dict[str, Any] = {}
    if not inside:
        options = {
            "step": _autocast_step(torch.bfloat16),
            "prepare": _prepare_under_autocast(torch.bfloat16),
        }
    compare_training(lambda: WithLoss(_Shared(use)), rows(), budgets=budgets, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=["bfloat16", "float64"])
def test_parameters_of_another_dtype(dtype: torch.dtype) -> None:
    def network() -> nn.Module:
        return WithLoss(_attention()).to(dtype)

    def inputs(iteration: int) -> Any:
        (x,), _ = _sequences(iteration)
        return (x.to(dtype),), {}

    compare_training(network, inputs)


class FrozenEncoder(nn.Module):
    """A layer of PyTorch's in evaluation mode without gradients, which then takes kernels of its own, before what trains."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder.requires_grad_(False)
        self.head = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 5))

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.encoder.eval()
        return self

    def forward(self, x: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
        if isinstance(self.encoder, nn.MultiheadAttention):
            encoded = self.encoder(x, x, x, key_padding_mask=padding)[0]
        else:
            encoded = self.encoder(x, src_key_padding_mask=padding)
        return self.head(encoded).square().mean()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", ["layer", "encoder", "padded encoder", "attention"])
def test_layers_that_do_without_a_backward_pass(kind: str) -> None:
    """``nn.TransformerEncoder`` does not ask by a tensor's type whether it is traced, but whether functions are overridden."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    encoders = {"layer": layer, "attention": nn.MultiheadAttention(32, 4, batch_first=True)}
    plain = FrozenEncoder(encoders.get(kind, nn.TransformerEncoder(layer, 2))).train()
    ours = copy.deepcopy(plain)
    padding = torch.arange(16) >= torch.tensor([16, 9, 12, 4])[:, None] if kind == "padded encoder" else None
    args = torch.randn(4, 16, 32), padding
    lowtide.rematerialize(ours, args, budget="100%")
    losses = [model(*args) for model in (plain, ours)]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    for theirs, mine in zip(plain.head.parameters(), ours.head.parameters(), strict=True):
        assert torch.equal(theirs.grad, mine.grad)


@pytest.mark.parametrize("name", ["bilinear", "affine_grid"])
def test_operators_that_cast_within(name: str) -> None:
    """Their kernels call operators that autocast casts for. (So does that of lstsq, which differs from itself in eager.)"""
    computed: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        "bilinear": lambda y, weight: F.bilinear(y, y, weight.expand(4, 8, 8)),
        "affine_grid": lambda y, weight: F.affine_grid(
            y.view(-1, 2, 3), [len(y) * 8 // 6, 1, 4, 4], align_corners=False
        ),
    }
    torch.manual_seed(0)
    linear = nn.Linear(8, 8)
    plain, x = Computing(linear, computed[name]), torch.randn(6, 8)
    ours = copy.deepcopy(plain)
    results = []
    for model in (plain, ours):
        with torch.autocast("cpu"):
            if model is ours:
                lowtide.rematerialize(ours, (x,), budget="100%")
            loss = model(x)
        loss.backward()
        results.append([loss, *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *results))


class Computing(nn.Module):
    def __init__(self, linear: nn.Linear, compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.compute = linear, compute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute(torch.tanh(self.linear(x)).float(), self.linear.weight).float().square().sum()
