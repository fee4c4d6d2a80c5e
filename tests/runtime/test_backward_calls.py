"""Reversible layers: what their own backward pass calls runs by plans, equal to eager to the bit and within the budget."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lowtide

WIDTH, ROWS = 64, 512


class _FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.dropout(torch.tanh(F.gelu(self.up(x))), 0.1, self.training))


class _Coupling(torch.autograd.Function):
    """Additive coupling, of which the outputs alone are kept (Gomez et al., The Reversible Residual Network, section 3.2)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, first: nn.Module, second: nn.Module) -> torch.Tensor:
        ctx.blocks, ctx.states = (first, second), []
        left, right = x.chunk(2, dim=-1)
        with torch.no_grad():
            ctx.states.append(torch.get_rng_state())
            left = left + first(right)
            ctx.states.append(torch.get_rng_state())
            right = right + second(left)
        found = torch.cat((left, right), -1)
        ctx.save_for_backward(found)
        return found

    @staticmethod
    def backward(ctx: Any, *arriving: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (found,), (first, second) = ctx.saved_tensors, ctx.blocks
        left, right = found.chunk(2, dim=-1)
        to_left, to_right = arriving[0].chunk(2, dim=-1)
        now = torch.get_rng_state()
        right, to_left = _taken_back(second, ctx.states[1], left, right, to_right, to_left)
        left, to_right = _taken_back(first, ctx.states[0], right, left, to_left, to_right)
        torch.set_rng_state(now)
        return torch.cat((to_left, to_right), -1), None, None


def _taken_back(
    block: nn.Module,
    state: torch.Tensor,
    given: torch.Tensor,
    other: torch.Tensor,
    to_other: torch.Tensor,
    to: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``other`` as it was before the block's result was added, and the gradient of what was ``given`` to the block."""
    with torch.enable_grad():
        torch.set_rng_state(state)
        given = given.detach().requires_grad_()
        result = block(given)
        result.backward(to_other)
    assert given.grad is not None
    return other - result.detach(), to + given.grad


class _Reversible(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_FeedForward() for _ in range(2 * depth))
        self.head = nn.Linear(2 * WIDTH, 1)
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for first, second in zip(self.blocks[::2], self.blocks[1::2], strict=True):
            x = _Coupling.apply(x.requires_grad_() if x.is_leaf else x, first, second)
        if self.fails:
            x.register_hook(_fail)
        return self.head(x)


def _fail(_: torch.Tensor) -> None:
    raise RuntimeError("in the backward pass")


def _steps(model: nn.Module, count: int = 4, rows: int = ROWS) -> list[Any]:
    """Of each step the peak in bytes, the loss and the gradients."""
    found = []
    for number in range(count):
        torch.manual_seed(number)
        x, losses = torch.randn(rows, 2 * WIDTH), list[torch.Tensor]()
        model.zero_grad()

        def step(x: torch.Tensor = x, losses: list[torch.Tensor] = losses) -> None:
            losses.append(model(x).square().mean())
            losses[0].backward()

        peak_bytes = lowtide.measure(step).peak_bytes
        gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        found.append((peak_bytes, losses[0].detach(), gradients))
    return found


def _assert_equal(found: list[Any], wanted: list[Any]) -> None:
    for (_, loss, grads), (_, expected, wanted_grads) in zip(found, wanted, strict=True):
        assert torch.equal(loss, expected)
        assert len(grads) == len(wanted_grads)
        assert all(map(torch.equal, grads, wanted_grads))


def _assert_within(model: nn.Module, share: float) -> None:
    """Steps within a share of the plain peak are equal, and keep it from the third one on."""
    plain = _steps(copy.deepcopy(model))
    budget = int(share * plain[-1][0])
    lowtide.rematerialize(model, (torch.randn(ROWS, 2 * WIDTH),), budget=budget)
    found = _steps(model, 6)
    _assert_equal(found[:4], plain)
    assert max(peak for peak, *_ in found[2:]) <= budget


def test_what_the_backward_pass_calls_is_planned() -> None:
    model = _Reversible()
    _assert_within(model, 0.75)
    assert len(lowtide.plans(model)) == len(model.blocks)


class _Waves(_Reversible):
    """What code between its parts saves is most of a step, and the online mode alone can evict it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(24):
            x = torch.sin(x.requires_grad_() if x.is_leaf else x)
        return super().forward(x)


@pytest.mark.filterwarnings("ignore:the online mode has spent")
def test_what_does_not_fit_in_parts_runs_online(caplog: pytest.LogCaptureFixture) -> None:
    """What its parts run in the backward pass is no other model's, so that steps are its own."""
    model, rows = _Waves(), 4 * ROWS
    plain = _steps(copy.deepcopy(model), 6, rows)
    lowtide.rematerialize(model, (torch.randn(rows, 2 * WIDTH),), budget="70%")
    found = _steps(model, 6, rows)
    _assert_equal(found, plain)
    assert max(peak for peak, *_ in found[4:]) <= 0.7 * plain[0][0]
    assert "its parts do not fit" in caplog.text and model.forward.is_online


def test_a_backward_pass_that_fails_leaves_nothing_behind() -> None:
    model = _Reversible()
    plain = _steps(copy.deepcopy(model))
    lowtide.rematerialize(model, (torch.randn(ROWS, 2 * WIDTH),), budget="90%")
    _steps(model, 2)
    model.fails = True
    with pytest.raises(RuntimeError, match="in the backward pass"):
        _steps(model, 1)
    assert all("forward" in block.__dict__ for block in model.blocks)
    model.fails = False
    _assert_equal(_steps(model), plain)
    assert not any("forward" in block.__dict__ for block in model.blocks)


class _Distilled(nn.Module):
    """Another module is evaluated for what it should return, and decided about."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student, self.head = _FeedForward().eval(), _FeedForward(), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.head(x)
        with torch.no_grad():
            wanted = self.teacher(x)
        return F.mse_loss(self.student(x), wanted) if wanted.sum() > -1e9 else x.sum()


def test_modules_called_without_gradients_in_the_forward_pass_alone() -> None:
    model = _Distilled()
    plain = _steps(copy.deepcopy(model))
    lowtide.rematerialize(model, (torch.randn(ROWS, 2 * WIDTH),), budget="90%")
    _assert_equal(_steps(model), plain)
    (plan,) = lowtide.plans(model)
    assert plan.graph.name == "_FeedForward"


class _Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(2 * WIDTH, WIDTH), nn.ModuleList(_FeedForward() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            if x.detach().sum() > -1e9:
                x = x + checkpoint(block, x, use_reentrant=True)
        return x


def test_checkpoints_that_run_again_in_a_backward_pass_of_their_own() -> None:
    model = _Checkpointed()
    plain = _steps(copy.deepcopy(model))
    lowtide.rematerialize(model, (torch.randn(ROWS, 2 * WIDTH),), budget="75%")
    _assert_equal(_steps(model), plain)
    assert len(lowtide.plans(model)) == len(model.blocks)


class _Flow(nn.Module):
    """Steps along the gradient of an energy, which are differentiated, and a head. It decides by what it computes, so it is no
    single program."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(
            nn.Linear(2 * WIDTH, 64), nn.Softplus(), nn.Linear(64, 64), nn.Softplus(), nn.Linear(64, 1)
        )
        self.first, self.head = nn.Linear(2 * WIDTH, WIDTH), _FeedForward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        for _ in range(2):
            (slope,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
            if slope.detach().sum() > -1e9:
                x = x + 0.1 * slope
        return self.head(self.first(x))


def test_parts_that_the_model_differentiates_twice_run_as_they_are() -> None:
    model = _Flow()
    plain = _steps(copy.deepcopy(model))
    lowtide.rematerialize(model, (torch.randn(ROWS, 2 * WIDTH),), budget="90%")
    _assert_equal(_steps(model), plain)
    assert [plan.graph.name for plan in lowtide.plans(model)] == ["_FeedForward"]


_FORCES = """
class Forces(nn.Module):
    def forward(self, energy, x):
        return torch.autograd.grad(energy.sum(), x, create_graph=True)[0]
"""
_POTENTIAL = """
class Potential(nn.Module):
    def __init__(self, energy, forces):
        super().__init__()
        self.energy, self.forces = energy, forces

    def forward(self, x):
        x = x.requires_grad_()
        energy = self.energy(x)
        return energy + self.forces(energy, x).square().sum(1, keepdim=True)
"""


def test_parts_that_another_module_differentiates_twice_run_as_they_are() -> None:
    """The forces of a potential of molecules, say: its code does not name what that of another file does."""
    forces, potential = ({"__name__": name, "torch": torch, "nn": nn} for name in ("forces", "potential"))
    exec(_FORCES, forces)
    exec(_POTENTIAL, potential)
    model = potential["Potential"](_Flow().energy, forces["Forces"]())
    plain = _steps(copy.deepcopy(model))
    lowtide.rematerialize(model, (torch.randn(ROWS, 2 * WIDTH),), budget="90%")
    _assert_equal(_steps(model), plain)


class _Sampling(nn.Module):
    """Follows gradients of its energy to samples, each of them a backward pass within its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Linear(2 * WIDTH, 4 * WIDTH), nn.SiLU(), nn.Linear(4 * WIDTH, 4 * WIDTH), nn.SiLU())
        self.energy = nn.Sequential(*layers, nn.Linear(4 * WIDTH, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.energy.requires_grad_(False)
        sample = torch.zeros_like(x)
        for _ in range(4):
            sample.requires_grad_()
            sample = (sample - 0.1 * torch.autograd.grad(self.energy(sample).sum(), sample)[0]).detach()
        self.energy.requires_grad_(True)
        return self.energy(x).square().mean() - self.energy(sample).mean()


def test_backward_passes_within_the_forward_pass_free_what_they_read() -> None:
    model = _Sampling()
    plain = _steps(copy.deepcopy(model))
    lowtide.rematerialize(model, (torch.randn(ROWS, 2 * WIDTH),), budget="60%")
    found = _steps(model, 6)
    _assert_equal(found[:4], plain)
    assert lowtide.plans(model)
    assert max(peak for peak, *_ in found[4:]) <= 0.6 * plain[-1][0]


class _Cached(nn.Module):
    """Of representations that are computed without a graph, the gradients alone are kept; a hook on the result computes them
    again, piece by piece (Gao et al., Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup)."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), *(_FeedForward() for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, found = [], list[torch.Tensor]()
        for piece in x.split(len(x) // 2):
            states.append(torch.get_rng_state())
            with torch.no_grad():
                found.append(self.model(piece).requires_grad_())
        loss = F.mse_loss(*found)
        loss.backward()
        result = loss.detach().requires_grad_()

        def again(arrived: torch.Tensor) -> None:
            now = torch.get_rng_state()
            for state, piece, kept in zip(states, x.split(len(x) // 2), found, strict=True):
                torch.set_rng_state(state)
                with torch.enable_grad():
                    self.model(piece).backward(kept.grad * arrived)
            torch.set_rng_state(now)

        result.register_hook(again)  # type: ignore[no-untyped-call]
        return result


def test_gradients_that_are_cached() -> None:
    """What calls the submodules is a hook on the result, which is a leaf, that was there before ours."""
    model = _Cached()
    _assert_within(model, 0.6)
    (plan,) = lowtide.plans(model)
    assert plan.graph.name == "Sequential"
