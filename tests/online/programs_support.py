"""Train a dynamic program and keep everything that it leaves, to be compared bit for bit."""

from __future__ import annotations

import contextlib
import functools
import gc
from dataclasses import dataclass
from typing import Any

import torch

import lowtide
from examples.dynamic import load
from examples.dynamic.program import Program, seeded
from tests.support.wide import is_wide

STEPS = 3 if is_wide() else 2


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a training left, and the peak and the final level of the allocator above its level at the start.

    ``tensors``: losses, parameters, gradients, buffers, optimizer state and the generator's state by name; ``None`` for a
    gradient that is not there.
    """

    tensors: dict[str, torch.Tensor | None]
    peak_bytes: int
    final_bytes: int


@functools.cache
def eager(name: str, steps: int = STEPS) -> Outcome:
    """The outcome without any context; a first run has already made what is made once in a process."""
    load(name)(1).step(0)
    return train(load(name)(1), contextlib.nullcontext(), steps)


def train(program: Program, context: contextlib.AbstractContextManager[Any], steps: int = STEPS) -> Outcome:
    """All ``steps`` inside one ``context``, from the same generator state every time."""
    losses: list[tuple[torch.Tensor, ...]] = []

    def run() -> None:
        with context:
            for index in range(steps):
                losses.append(program.step(index))
        collect()

    collect()
    with seeded(1):
        measurement = lowtide.measure(run)
        generator = torch.get_rng_state()
    tensors = {f"loss {step}.{number}": loss for step, row in enumerate(losses) for number, loss in enumerate(row)}
    left = {**tensors, **_state(program), "generator": generator}
    return Outcome(left, measurement.peak_bytes, measurement.final_bytes)


def collect() -> None:
    """Free all that is garbage: graphs of tensors, then what they held, and what a backward pass that failed left behind."""
    torch.zeros((), requires_grad=True).backward()  # takes the unfinished tasks of the last one off the queue
    while gc.collect():
        pass


def _state(program: Program) -> dict[str, torch.Tensor | None]:
    state: dict[str, torch.Tensor | None] = {}
    for number, module in enumerate(program.modules):
        state |= {f"{number}.{name}": tensor for name, tensor in module.state_dict().items()}
        state |= {f"{number}.{name}.grad": parameter.grad for name, parameter in module.named_parameters()}
    for number, optimizer in enumerate(program.optimizers):
        for index, entries in optimizer.state_dict()["state"].items():
            state |= {f"optimizer {number}.{index}.{name}": value for name, value in entries.items()}
    return state


def assert_same(actual: Outcome, expected: Outcome) -> None:
    """Equal to the bit in every tensor, by name."""
    assert actual.tensors.keys() == expected.tensors.keys()
    different = [name for name, tensor in actual.tensors.items() if not _equal(tensor, expected.tensors[name])]
    assert not different, f"{len(different)} of {len(actual.tensors)} tensors differ from eager's: {different[:8]}"


def _equal(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return first.dtype == second.dtype and first.stride() == second.stride() and torch.equal(first, second)
