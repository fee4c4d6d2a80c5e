"""Run a small scenario plainly and under a budget, and compare what comes out, what it took and what it left behind."""

from __future__ import annotations

import contextlib
import linecache
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

import lowtide
from examples.dynamic.program import seeded
from tests.online.programs_support import collect

ROWS, WIDTH, LENGTH = 256, 64, 24
TENSOR_BYTES = ROWS * WIDTH * 4

Scenario = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Result:
    """What a scenario returned, the generator's state after it, and allocator levels above that at its start."""

    value: Any
    generator: torch.Tensor
    peak_bytes: int
    final_bytes: int


def perform(setup: Callable[[], Scenario], context: contextlib.AbstractContextManager[Any]) -> Result:
    """``setup()`` outside and what it returns inside ``context``, always from the same generator state."""
    values: list[Any] = []

    def inside() -> None:
        with context:
            values.append(scenario())
        collect()

    with seeded(2):
        scenario = setup()
        collect()
        measurement = lowtide.measure(inside)
        generator = torch.get_rng_state()
    return Result(values[0], generator, measurement.peak_bytes, measurement.final_bytes)


def compare(setup: Callable[[], Scenario], share: int = 60, *, holds: bool = False, evicts: bool = True) -> Any:
    """The statistics of a run at ``share`` percent of the eager peak that agreed with eager in everything.

    Equal to the bit: the scenario's value and the generator. Equal to the byte: what is alive after leaving. The peak is
    within the budget, unless the scenario ``holds`` more than that when the context is left.
    """
    perform(setup, contextlib.nullcontext())  # what is made once in a process
    expected = perform(setup, contextlib.nullcontext())
    budget = expected.peak_bytes * share // 100
    session = lowtide.online(budget, warn_above=1e9)
    actual = perform(setup, session)
    assert_same_values(actual.value, expected.value)
    assert torch.equal(actual.generator, expected.generator), "the generator's state"
    assert actual.final_bytes == expected.final_bytes, "bytes alive after leaving"
    assert holds or actual.peak_bytes <= budget
    assert session.statistics.evictions > 0 or not evicts
    return session.statistics


def assert_same_values(actual: Any, expected: Any) -> None:
    """The same structure; tensors equal in dtype, layout and bits, anything else by ``==``."""
    ours, structure = pytree.tree_flatten(actual)
    theirs, expected_structure = pytree.tree_flatten(expected)
    assert structure == expected_structure
    for index, (first, second) in enumerate(zip(ours, theirs, strict=True)):
        assert type(first) is type(second), f"leaf {index}"
        if isinstance(first, torch.Tensor):
            assert (first.dtype, first.shape, first.stride()) == (second.dtype, second.shape, second.stride())
            assert torch.equal(first, second), f"leaf {index} differs"
        else:
            assert first == second, f"leaf {index}: {first!r} instead of {second!r}"


def chain(length: int = LENGTH) -> list[torch.Tensor]:
    """Tensors that are each made of the one before, all of them held; fewer than half fit most budgets here."""
    tensors = [torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH)]
    for index in range(length):
        tensors.append(torch.tanh(tensors[-1] * 1.25 + index / 8))
    return tensors


class Block(nn.Module):
    """Linear, BatchNorm, in-place ReLU and dropout around a residual connection that is added in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.activation = nn.ReLU(inplace=True)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.dropout(self.activation(self.norm(self.linear(x))))
        return result.add_(x)


class Training:
    """A network, its optimizer and its data. ``Training()`` is made outside, ``steps`` run inside a context."""

    def __init__(self, depth: int = 8) -> None:
        self.blocks = [Block() for _ in range(depth)]
        self.model = nn.Sequential(*self.blocks, nn.Linear(WIDTH, 4))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.data = torch.randn(4, ROWS, WIDTH)

    def loss(self, index: int) -> torch.Tensor:
        result: torch.Tensor = self.model(self.data[index % len(self.data)]).square().mean()
        return result

    def step(self, index: int) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(index)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def steps(self, count: int = 3) -> list[torch.Tensor]:
        return [self.step(index) for index in range(count)]

    def state(self) -> dict[str, Any]:
        """Parameters, buffers and gradients by name."""
        gradients = {f"{name}.grad": parameter.grad for name, parameter in self.model.named_parameters()}
        return {**self.model.state_dict(), **gradients}


@contextlib.contextmanager
def interrupted_inside(package: str, events: int = 0) -> Iterator[list[int]]:
    """``KeyboardInterrupt`` at the ``events``-th line that runs in ``package``, or the next one: anywhere a signal could strike
    but between the end of a ``with`` block and its exit, where Python itself would not run that.

    With 0 events the lines are only counted; the number is in the list.
    """
    lines, latest = [0], dict[int, int]()  # and, by the id of a frame, where it was

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_globals.get("__name__", "").startswith(package):
            return None
        before = latest.get(id(frame), 0) if event == "line" else 0
        latest[id(frame)] = frame.f_lineno if event == "line" else 0
        lines[0] += event == "line"
        if events and lines[0] >= events and not _leaves_block(frame, before):
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(previous)


def _leaves_block(frame: FrameType, before: int) -> bool:
    """Whether the frame, which was at the line ``before``, is back at a ``with`` statement to leave it."""
    code = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return before > frame.f_lineno and code.lstrip().startswith("with ")
