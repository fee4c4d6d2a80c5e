"""One model of another package: trained plainly and with lowtide in turns, compared to the bit, measured."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

import lowtide
from benchmarks.outcomes import error_text
from benchmarks.outside_models import OUTSIDE
from benchmarks.zoo import SEED, Sample

TIMED = 9
_SLACK = 1.03  # of the budget
_LOSS_COPIES = 3  # of results, that the loss outside of the model holds
_MESSAGE = 200
_DEPTH = 3
_WHOLE = -1
_LATE_SECONDS = 20.0  # that a search in the background may take


@dataclass(frozen=True, slots=True)
class Row:
    """One model. ``outcome``: "good", "refused", "broken" (differs, or fails where plain PyTorch does not), "over" (a peak
    above the budget), "unfinished" (in the time given) or "not built" (plain PyTorch does not run it). ``budget`` as asked
    for, or in bytes where that could not be met. ``parts``: how many ran by plans, -1 for a model that is planned as a whole.
    ``peak`` and ``time`` are shares of the plain ones, ``predicted`` is the share that the plans in force
    say, and the first runs of what runs again. Times are the thread's own, which other work on the machine does not lengthen;
    ``first`` is the wall's."""

    model: str
    package: str
    outcome: str
    budget: str
    parts: int = _WHOLE
    plain_peak_bytes: int = 0
    peak: float = 0.0
    time: float = 0.0
    predicted: float = 0.0
    plain_step_ms: float = 0.0
    first: float = 0.0
    message: str = ""


def row_of(name: str, budget: int | str, steps: int) -> Row:
    """The row of a model: at the smallest budget that is named where the one asked for cannot be met."""
    package = OUTSIDE[name].package
    try:
        tried = _Run(_made(name))
        tried.step()
        tried.optimizer.step()
        plain, own = _Run(_made(name)), _Run(_made(name))
    except Exception as error:  # noqa: BLE001 (whatever the package says)
        return Row(name, package, "not built", str(budget), message=error_text(error, _MESSAGE))
    try:
        return _trained(name, plain, own, budget, steps)
    except lowtide.InfeasibleBudgetError as error:
        if isinstance(budget, int):
            return Row(name, package, "refused", str(budget), message=error_text(error, _MESSAGE))
        return row_of(name, error.minimum_bytes * 101 // 100, steps)
    except lowtide.CaptureError as error:
        return Row(name, package, "refused", str(budget), message=error_text(error, _MESSAGE))
    except Exception as error:  # noqa: BLE001 (a failure is a result)
        return Row(name, package, "broken", str(budget), message=error_text(error, _MESSAGE))


def _made(name: str) -> Sample:
    """From the same generators each time."""
    random.seed(SEED)
    np.random.seed(SEED)
    return OUTSIDE[name].make()


class _Run:
    """A model in training: with SGD, from generators of its own."""

    def __init__(self, sample: Sample) -> None:
        self.model, self.args, self.kwargs = sample
        self.optimizer = torch.optim.SGD([*self.model.parameters()], 1e-3)
        self.generators = _generators()
        self.peak_bytes, self.seconds, self.wall_seconds, self.result_bytes = 0, 0.0, 0.0, 0
        self.loss = torch.zeros(())

    def step(self) -> None:
        _put_back(self.generators)
        self.optimizer.zero_grad()
        self.peak_bytes = lowtide.measure(self._pass).peak_bytes
        self.generators = _generators()

    def _pass(self) -> None:
        began, wall = time.thread_time(), time.perf_counter()
        result = self.model(*self.args, **self.kwargs)
        loss = loss_of(result)
        if not (loss is result or getattr(result, "loss", None) is loss):
            self.result_bytes = sum(one.nbytes for one in _tensors(result, _DEPTH) if one.requires_grad)
        del result
        loss.backward()
        self.seconds, self.wall_seconds = time.thread_time() - began, time.perf_counter() - wall
        self.loss = loss.detach()

    def differs(self, other: _Run) -> str:
        """In what from the other run, to the bit; empty where in nothing."""
        if not _same(self.loss, other.loss):
            return "loss"
        for (name, one), (_, two) in zip(self.model.named_parameters(), other.model.named_parameters(), strict=True):
            if not _same(one, two):
                return f"parameter {name}"
            if (one.grad is None) != (two.grad is None) or (one.grad is not None and not _same(one.grad, two.grad)):
                return f"gradient of {name}"
        for (name, one), two in zip(self.model.named_buffers(), other.model.buffers(), strict=True):
            if not _same(one, two):
                return f"buffer {name}"
        return "" if _alike(self.generators, other.generators) else "generators"


def _trained(name: str, plain: _Run, own: _Run, budget: int | str, steps: int) -> Row:
    own.generators = plain.generators
    began = time.perf_counter()
    lowtide.rematerialize(own.model, own.args, own.kwargs, budget=budget)
    planning_seconds = time.perf_counter() - began
    peaks, ratios, plains, different, first, plain_peak = [], [], [], "", 0.0, 0
    for number in range(steps + TIMED):
        if number == steps:
            _wait(own.model)
        plain.step()
        own.step()
        different = different or (own.differs(plain) and f"step {number + 1} differs from eager: {own.differs(plain)}")
        first = first or planning_seconds + own.wall_seconds
        plain_peak = max(plain_peak, plain.peak_bytes)  # of the fullest step, where layers are dropped at random
        if number >= steps:
            peaks.append(own.peak_bytes)
            ratios.append(own.seconds / plain.seconds)
            plains.append(plain.seconds)
        for run in (plain, own):
            run.optimizer.step()
    share = max(peaks) / plain_peak
    limit = _SLACK * (budget if isinstance(budget, int) else float(budget.rstrip("%")) / 100 * plain_peak)
    limit += _LOSS_COPIES * own.result_bytes
    outcome = "broken" if different else "over" if max(peaks) > limit else "good"
    count, predicted = _plans(own.model, statistics.median(plains))
    return Row(
        name, OUTSIDE[name].package, outcome, str(budget), count, plain_peak, round(share, 3),
        round(statistics.median(ratios), 3), round(predicted, 3), round(1e3 * statistics.median(plains), 1),
        round(first, 1), different,
    )  # fmt: skip


def _wait(model: nn.Module) -> None:
    """Until the search in the background has ended."""
    model.forward.improving.wait(_LATE_SECONDS)  # type: ignore[union-attr]


def _plans(model: nn.Module, plain_seconds: float) -> tuple[int, float]:
    """How many parts run by plans, and the step's time as a share of the plain one's as predicted; 0 where it runs online."""
    forward: Any = model.forward
    if forward.is_online:
        return 0, 0.0
    if forward.parts is None:
        return _WHOLE, 1 + forward.latest.plan.overhead
    passes = forward.parts.shared.ran
    more = (
        sum(one.entry.plan.time_ns - one.entry.plan.costs.total_time_ns for one in passes)
        + forward.parts.watch.again_ns
    )
    return len(forward.parts.planned()), 1 + more / 1e9 / plain_seconds


def loss_of(result: Any) -> torch.Tensor:
    """The scalar to differentiate: the result itself where it is one, else its ``loss``, else the mean squares of all tensors
    in it that have a gradient."""
    if isinstance(result, torch.Tensor) and result.numel() == 1:
        return result.reshape(())
    loss = getattr(result, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss if loss.dim() == 0 else loss.mean()
    found = [one for one in _tensors(result, _DEPTH) if one.requires_grad]
    squares = [(one.abs() if one.is_complex() else one).square().mean().float() for one in found]
    return torch.stack(squares).sum()


def _tensors(value: Any, depth: int) -> Iterator[torch.Tensor]:
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif depth and hasattr(leaf, "__dict__") and not isinstance(leaf, nn.Module):
            for name, held in vars(leaf).items():
                if not name.startswith("__"):
                    yield from _tensors(held, depth - 1)


def _generators() -> tuple[Any, ...]:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def _put_back(state: tuple[Any, ...]) -> None:
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])


def _alike(one: tuple[Any, ...], two: tuple[Any, ...]) -> bool:
    numpy = all(np.array_equal(a, b) for a, b in zip(one[2], two[2], strict=True))
    return torch.equal(one[0], two[0]) and one[1] == two[1] and numpy


def _same(one: torch.Tensor, two: torch.Tensor) -> bool:
    """To the bit, but for which NaN it is."""
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    if one.layout is not torch.strided:
        one, two = one.to_dense(), two.to_dense()
    if torch.equal(one, two):
        return True
    return one.numel() > 0 and bool(((one == two) | (one.isnan() & two.isnan())).all())
