"""Memory that runs out: a limit below PyTorch's CPU allocator, of which what runs knows nothing."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

import lowtide
from lowtide.api import runtime_of
from lowtide.memory import cpu_allocator
from tests.support.networks import WithLoss, rows
from tests.support.records import scalar_loss
from tests.support.training import QUICK, copy_inputs, make


@contextlib.contextmanager
def memory_of(nbytes: int) -> Iterator[None]:
    """Inside, this thread may hold so much more than now: what it asks for beyond is refused, as where no memory is left."""
    counter = cpu_allocator.install()
    assert counter is not None
    gc.collect()  # what waits for the collector would be room
    before, counter.limited_thread = counter.limited_thread, threading.get_ident()
    counter.limit(counter.level_bytes + nbytes, lambda wanted: False)
    try:
        yield
    finally:
        counter.limit(None)
        counter.limited_thread = before


def drawing_body() -> nn.Sequential:
    """Draws random numbers, and updates buffers."""
    return nn.Sequential(
        *(layer for _ in range(5) for layer in (nn.Linear(32, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.2)))
    )


def drawing_network() -> nn.Module:
    return WithLoss(drawing_body())


def prepared(
    factory: Callable[[], nn.Module] = drawing_network, budget: int | str = "80%", **options: Any
) -> nn.Module:
    args, kwargs = copy_inputs(rows()(0))
    return lowtide.rematerialize(make(factory), args, kwargs, **{"budget": budget, "planner": QUICK, **options})


def plan_of(model: nn.Module) -> lowtide.Plan:
    (plan,) = lowtide.plans(model)
    return plan


class Scarce:
    """A training step in whose ``number``-th call, of a planned model, memory runs out: in the forward pass, for which there is
    a ``share`` of the plan's peak; or in the backward pass, before a gradient has left, or after some have (``where``)."""

    def __init__(self, where: str, number: int = 1, share: float = 0.6) -> None:
        self.where, self.number, self.share = where, number, share
        self.calls = 0

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        planned = runtime_of(model) is not None
        where, self.calls = self.where if planned and self.calls == self.number else "", self.calls + 1
        with contextlib.ExitStack() as ends:  # after the step
            if where == "forward":
                ends.enter_context(memory_of(int(self.share * max(plan.peak_bytes for plan in lowtide.plans(model)))))
            if where == "left":
                parameters = list(model.parameters())
                late = parameters[3 * len(parameters) // 4]
                hook = late.register_post_accumulate_grad_hook(lambda _: _enter(ends, memory_of(-64 << 10)))
                ends.callback(hook.remove)
            output = model(*args, **kwargs)
            if where == "forward" and output.dim():  # the loss outside of the model is no part of its budget
                ends.close()
            if where == "backward":
                output.register_hook(lambda _: _enter(ends, memory_of(512)))
            scalar_loss(output).backward()
        return output


def _enter(ends: contextlib.ExitStack, limit: contextlib.AbstractContextManager[None]) -> None:
    ends.enter_context(limit)
