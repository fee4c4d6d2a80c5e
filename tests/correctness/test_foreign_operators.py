"""Operators that others registered: one operator of a plan, run again only where they are what they declare."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lowtide
from lowtide.capture import capture
from tests.support.stepping import LeftBehind, assert_same, steps

WIDTH = 64
_SAMPLE = torch.zeros(8, 32, WIDTH)
_STATE = {"calls": 0}
_CACHE: dict[int, float] = {}
Operator = Callable[..., Any]


def _registered(
    name: str, kernel: Operator, mutates: Any = (), fake: Operator | None = torch.empty_like, **options: Any
) -> Operator:
    own = torch.library.custom_op(f"lowtide_foreign::{name}", kernel, mutates_args=mutates, **options)
    if fake is not None:
        own.register_fake(fake)
    return own


def _swish(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.numpy() / (1 + np.exp(-x.numpy())))


def _swish_gradient(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    s = torch.sigmoid(x)
    return g * (s + x * s * (1 - s))


def _masked(x: torch.Tensor) -> torch.Tensor:
    return x * (torch.rand_like(x) > 0.2)


def _masked_by_numpy(x: torch.Tensor) -> torch.Tensor:
    return x * torch.from_numpy((np.random.rand(*x.shape) > 0.2).astype("float32"))


def _scaled_by_python(x: torch.Tensor) -> torch.Tensor:
    return x * random.random()


def _counting(x: torch.Tensor) -> torch.Tensor:
    _STATE["calls"] += 1
    return x.sin()


def _computing_with_a_count(x: torch.Tensor) -> torch.Tensor:
    _STATE["calls"] += 1
    return x * (1 + _STATE["calls"] / 100)


def _with_a_cache(x: torch.Tensor) -> torch.Tensor:
    return x * _CACHE.setdefault(x.shape[-1], 2.0)


def _counting_in_a_closure() -> Operator:
    calls = 1

    def kernel(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return x + calls

    return kernel


def _log(x: torch.Tensor) -> None:
    _STATE["calls"] += 1


def _scale_(x: torch.Tensor, by: float) -> None:
    x.mul_(by)


def _scale_all_(xs: list[torch.Tensor], by: float) -> torch.Tensor:
    for x in xs:
        x.mul_(by)
    return xs[0].sum()


def _sine_into(x: torch.Tensor, *, out: torch.Tensor) -> None:
    out.copy_(x.sin())


def _moments(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x - x.mean(-1, keepdim=True), x.square().mean(-1, keepdim=True)


swish = _registered("swish", _swish)
swish_gradient = _registered("swish_gradient", _swish_gradient, fake=lambda x, g: torch.empty_like(x))
swish.register_autograd(  # type: ignore[attr-defined]
    lambda ctx, g: swish_gradient(*ctx.saved_tensors, g),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
masked = _registered("masked", _masked, tags=(torch.Tag.nondeterministic_seeded,))
masked_in_secret = _registered("masked_in_secret", _masked)
masked_by_numpy = _registered("masked_by_numpy", _masked_by_numpy)
scaled_by_python = _registered("scaled_by_python", _scaled_by_python)
counting = _registered("counting", _counting)
computing_with_a_count = _registered("computing_with_a_count", _computing_with_a_count)
with_a_cache = _registered("with_a_cache", _with_a_cache)
closing = _registered("closing", _counting_in_a_closure(), schema="(Tensor x) -> Tensor")
log = _registered("log", _log, fake=lambda x: None)
scale_ = _registered("scale_", _scale_, {"x"}, fake=lambda x, by: None)
scale_all_ = _registered("scale_all_", _scale_all_, {"xs"}, fake=lambda xs, by: xs[0].new_empty(()))
moments = _registered("moments", _moments, fake=lambda x: (torch.empty_like(x), x.new_empty(*x.shape[:-1], 1)))
without_fake = _registered("without_fake", torch.sin, fake=None, schema="(Tensor x) -> Tensor")
wrong_fake = _registered(
    "wrong_fake", lambda x: x.mT.contiguous().mT, fake=torch.empty_like, schema="(Tensor x) -> Tensor"
)

_LIBRARY = torch.library.Library("lowtide_foreign", "FRAGMENT")  # type: ignore[no-untyped-call]


def _defined(schema: str, kernel: Operator, fake: Operator) -> Operator:
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, kernel, "CPU")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"lowtide_foreign::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.lowtide_foreign, name)  # type: ignore[no-any-return]


scale_and_return_ = _defined("scale_and_return_(Tensor(a!) x, float by) -> Tensor(a!)", torch.mul, lambda x, by: x)
_LIBRARY.impl("scale_and_return_", lambda x, by: x.mul_(by), "CPU", allow_override=True)  # type: ignore[no-untyped-call]
sine_into = _defined("sine_into(Tensor x, *, Tensor(a!) out) -> ()", _sine_into, lambda x, *, out: None)
same_memory = _defined("same_memory(Tensor x) -> Tensor", lambda x: x.view(x.shape), torch.empty_like)
writing = _defined("writing(Tensor x) -> Tensor", lambda x: x.mul_(0.5) + 1, torch.empty_like)


class _SineInto(torch.autograd.Function):
    """As functions around extensions are written: memory for the result, and a kernel that fills it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        result = torch.empty_like(x)
        sine_into(x, out=result)
        ctx.save_for_backward(x)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * ctx.saved_tensors[0].cos()


def _copied(h: torch.Tensor) -> torch.Tensor:
    return h.detach().clone()


def _scaled(h: torch.Tensor) -> torch.Tensor:
    one = _copied(h)
    scale_(one, 0.5)
    return h * one


def _half_scaled(h: torch.Tensor) -> torch.Tensor:
    one = _copied(h)
    scale_(one[..., ::2], 0.5)
    return h * one


def _all_scaled(h: torch.Tensor) -> torch.Tensor:
    one, two = _copied(h), h.detach() * 2
    total = scale_all_([one, two], 0.5)
    return h * one * two + total


def _logged(h: torch.Tensor) -> torch.Tensor:
    log(h.detach())
    return h


class _Block(nn.Module):
    """``operator`` is what is tried, a method of the block's, too."""

    def __init__(self, operator: Operator) -> None:
        super().__init__()
        self.up, self.down, self.operator = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), operator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.operator(torch.tanh(self.up(x)))))


class _Blocks(nn.Module):
    def __init__(self, operator: Operator) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(operator) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def _steps(model: nn.Module) -> list[LeftBehind]:
    _STATE["calls"] = 0
    return list(steps(model, (8, 32, WIDTH), 3, lambda: _STATE["calls"]))


def _compare(operator: Operator, share: float = 0.6) -> nn.Module:
    """Training is equal to eager's to the bit, and within the budget in its last step; the planned model."""
    plain, model = (_seeded(operator) for _ in range(2))
    expected = _steps(plain)
    budget = int(share * max(peak for _, _, peak in expected))
    _STATE["calls"] = 0
    lowtide.rematerialize(model, (_SAMPLE,), budget=budget)
    assert _STATE["calls"] == 0, "preparation ran an operator that counts, and left the count"
    found = _steps(model)
    assert_same(expected, found)
    assert found[-1][2] <= budget
    return model


def _seeded(operator: Operator) -> _Blocks:
    torch.manual_seed(0)
    return _Blocks(operator)


PURE = {
    "differentiable": swish,
    "several results": lambda h: torch.mul(*moments(h.detach())) + h,
    "a cache": lambda h: h * with_a_cache(h.detach()),
    "writes into a copy": _scaled,
    "writes into a view": _half_scaled,
    "writes into a list": _all_scaled,
    "returns what it writes": lambda h: h * scale_and_return_(h.detach().clone(), 0.5),
    "out of a function": _SineInto.apply,
    "declared random": lambda h: h * masked(h.detach()),
    "random": lambda h: h * masked_in_secret(h.detach()),
}
IMPURE = {
    "NumPy's numbers": (lambda h: h * masked_by_numpy(h.detach()), "generator of NumPy"),
    "Python's numbers": (lambda h: h * scaled_by_python(h.detach()), "generator of Python"),
    "a counter": (lambda h: h * counting(h.detach()), "changes .*_STATE"),
    "a counter that counts": (lambda h: h * computing_with_a_count(h.detach()), "changes .*_STATE"),
}


def _ours(plan: lowtide.Plan) -> list[Any]:
    return [op for op in plan.graph.ops if "lowtide_foreign" in op.target and op.phase.value == "forward"]


@pytest.mark.parametrize("name", PURE)
def test_one_operator_that_may_run_again(name: str) -> None:
    (plan,) = lowtide.plans(_compare(PURE[name]))
    assert plan.overhead > 0
    assert len(_ours(plan)) == 4 and not any(op.effect for op in _ours(plan))
    assert all(op.random == (name in ("declared random", "random")) for op in _ours(plan))


@pytest.mark.parametrize("name", IMPURE)
def test_hidden_state_and_hidden_randomness_run_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    operator, why = IMPURE[name]
    (plan,) = lowtide.plans(_compare(operator))
    assert len(_ours(plan)) == 4 and all(op.effect for op in _ours(plan))
    assert re.search(f"{why}: it runs once in a step, and its results are kept", caplog.text)


def test_a_counter_in_a_closure(caplog: pytest.LogCaptureFixture) -> None:
    plan = lowtide.plan(_Blocks(lambda h: h * closing(h.detach())), (_SAMPLE,), budget="60%")
    assert all(op.effect for op in _ours(plan)) and "closing.default changes" in caplog.text
    assert torch.equal(closing(_SAMPLE), torch.full_like(_SAMPLE, 2.0))


def test_operators_without_results_run_and_are_not_measured() -> None:
    _compare(_logged)


REFUSED = {
    "no fake implementation": (without_fake, "has no fake implementation"),
    "another layout": (
        lambda h: h * wrong_fake(h.detach()),
        "has a fake implementation that returns another",
    ),
    "memory of an argument": (lambda h: h * same_memory(h.detach()), "returns memory of one of its arguments"),
    "an argument that is written": (lambda h: h * writing(h.detach() * 2), "writes into an argument"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_registrations_get_a_clear_line(name: str) -> None:
    operator, why = REFUSED[name]
    with pytest.raises(lowtide.CaptureError, match=why):
        lowtide.plan(_Blocks(operator), (_SAMPLE,), budget="60%")


def test_operators_of_tritons_kernels_stay_operators() -> None:
    """The kernels themselves need a device: what is in their place here is PyTorch's."""
    operator = torch.library.triton_op("lowtide_foreign::doubled", _doubled, mutates_args=())
    program = capture(_Blocks(lambda h: h * operator(h.detach())), (_SAMPLE,)).program
    assert [op.target for op in program.graph.ops].count("lowtide_foreign.doubled.default") == 4


def _doubled(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * 2
