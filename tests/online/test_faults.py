"""Exceptions and interrupts wherever they can happen: the context goes on, the next step is exact, nothing is kept."""

from __future__ import annotations

import contextlib
import gc
import signal
import sys
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch

import lowtide
from tests.online.programs_support import collect
from tests.online.scenarios import (
    ROWS,
    TENSOR_BYTES,
    Scenario,
    Training,
    assert_same_values,
    chain,
    compare,
    interrupted_inside,
    perform,
)


class Fault(Exception):
    """Raised by the tests."""


def test_exception_inside_an_operator() -> None:
    def setup() -> Scenario:
        training = Training()

        def scenario() -> Any:
            training.step(0)
            hidden = training.model[:6](training.data[0])
            with pytest.raises(IndexError):
                hidden[torch.full((ROWS,), ROWS)]
            with pytest.raises(RuntimeError, match="mat1 and mat2"):
                hidden @ hidden
            del hidden
            return training.steps(), training.state()

        return scenario

    compare(setup)


def test_operands_of_a_failed_operator() -> None:
    """An operator that fails has changed neither its inputs nor what they are made of.

    What it was to write stays in memory, as it might have been written in part.
    """

    def setup() -> Scenario:
        def scenario() -> Any:
            tensors = chain()
            for tensor in tensors:
                with pytest.raises(RuntimeError):
                    torch.mm(tensor, tensor)
            for tensor in tensors[::6]:
                with pytest.raises(RuntimeError):
                    tensor.add_(torch.ones(3))
            return [tensor.sum().item() for tensor in tensors]

        return scenario

    compare(setup)


class _FailingBackward(torch.autograd.Function):
    error: type[BaseException] = Fault

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise _FailingBackward.error


Handles = contextlib.ExitStack
Failing = Callable[[Training, type[BaseException], Handles], torch.Tensor]


def _in_function(training: Training, error: type[BaseException], handles: Handles) -> torch.Tensor:
    _FailingBackward.error = error
    hidden = training.model[:4](training.data[0])
    loss: torch.Tensor = training.model[4:](_FailingBackward.apply(hidden)).sum()
    return loss


def _in_tensor_hook(training: Training, error: type[BaseException], handles: Handles) -> torch.Tensor:
    hidden = training.model[:4](training.data[0])
    hidden.register_hook(_raiser(error))
    loss: torch.Tensor = training.model[4:](hidden).sum()
    return loss


def _in_parameter_hook(training: Training, error: type[BaseException], handles: Handles) -> torch.Tensor:
    handles.enter_context(training.blocks[2].linear.weight.register_post_accumulate_grad_hook(_raiser(error)))
    return training.loss(0)


def _in_module_hook(training: Training, error: type[BaseException], handles: Handles) -> torch.Tensor:
    handles.enter_context(training.model[8].register_full_backward_hook(_raiser(error)))
    return training.loss(0)


def _in_forward_hook(training: Training, error: type[BaseException], handles: Handles) -> torch.Tensor:
    handles.enter_context(training.model[5].register_forward_hook(_raiser(error)))
    return training.loss(0)


def _raiser(error: type[BaseException]) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise error

    return fail


_FAILING = (_in_function, _in_tensor_hook, _in_parameter_hook, _in_module_hook, _in_forward_hook)


@pytest.mark.parametrize("error", [Fault, KeyboardInterrupt])
@pytest.mark.parametrize("fails", _FAILING, ids=lambda fails: fails.__name__.removeprefix("_in_"))
def test_exception_in_backward_or_a_hook(fails: Failing, error: type[BaseException]) -> None:
    def setup() -> Scenario:
        training = Training()

        def scenario() -> Any:
            first = training.step(0)
            with contextlib.ExitStack() as handles, pytest.raises(error):
                fails(training, error, handles).backward()
            return first, training.steps(), training.state()

        return scenario

    compare(setup)


def test_leaving_by_an_exception() -> None:
    """What is held is rebuilt, what is not is gone, and the context can be entered again."""
    expected = chain()
    session = lowtide.online(8 * TENSOR_BYTES)
    held: list[torch.Tensor] = []
    with pytest.raises(Fault), session:
        held.extend(chain())
        raise Fault
    assert session.statistics.evictions > 0
    assert all(map(torch.equal, held, expected))
    with session:
        assert [tensor.sum().item() for tensor in chain()] == [tensor.sum().item() for tensor in expected]


def test_intermediates_of_a_failed_step_are_released() -> None:
    training = Training()
    with lowtide.online(20 * TENSOR_BYTES):
        hidden = training.model[:4](training.data[0])
        alive = weakref.ref(hidden)
        with contextlib.ExitStack() as handles, pytest.raises(Fault):
            _in_module_hook(training, Fault, handles).backward()
        del hidden
        gc.collect()
        assert alive() is None


@contextlib.contextmanager
def _interrupted_at(call: int) -> Iterator[None]:
    """``KeyboardInterrupt`` in this thread, from a signal, at the ``call``-th call that Python code makes to C functions.

    Where nothing can be raised (a callback of the garbage collector, say), Python drops the exception: the signal comes
    again at the next call, as a user would press the keys again.
    """
    report = sys.unraisablehook
    left = call

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal left
        if event == "c_call":
            left -= 1
            if left == 0:
                sys.setprofile(None)
                signal.raise_signal(signal.SIGINT)

    def again(dropped: sys.UnraisableHookArgs) -> None:
        nonlocal left
        if dropped.exc_type is KeyboardInterrupt:
            left = 1
            sys.setprofile(count)
        else:
            report(dropped)

    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.unraisablehook = again
    try:
        sys.setprofile(count)
        yield
    finally:
        sys.setprofile(None)
        sys.unraisablehook = report
        signal.signal(signal.SIGINT, previous)


@pytest.mark.parametrize("lost", [1, 3])
def test_an_interrupt_that_python_drops_comes_again(lost: int) -> None:
    """What the tests below rely on."""
    left = lost

    class Busy:
        def __del__(self) -> None:
            nonlocal left
            left -= 1
            while True:  # until interrupted
                len(())

    with pytest.raises(KeyboardInterrupt), _interrupted_at(50):
        while True:
            if left:
                Busy()
            else:
                len(())
    assert left == 0


def _starting_over(interrupted: Callable[[Callable[[], Any]], Any]) -> Callable[[], Scenario]:
    """A scenario that trains, is interrupted, loads what it started from and trains again, all in one context."""

    def setup() -> Scenario:
        training = Training()
        start = {name: tensor.clone() for name, tensor in training.model.state_dict().items()}

        def scenario() -> Any:
            interrupted(lambda: training.steps(1000))
            collect()
            training.model.load_state_dict(start)
            training.optimizer = torch.optim.SGD(training.model.parameters(), lr=0.01, momentum=0.9)
            torch.manual_seed(3)
            return training.steps(), training.state()

        return scenario

    return setup


@pytest.mark.parametrize("call", [10, 300, 3_000, 12_000, pytest.param(30_000, marks=pytest.mark.slow), 60_000])
def test_interrupt_by_a_signal(call: int) -> None:
    """In the first operator, and up to the fourth step inside the context."""

    def interrupted(train: Callable[[], Any]) -> None:
        with pytest.raises(KeyboardInterrupt), _interrupted_at(call):
            train()

    compare(_starting_over(interrupted), share=100, evicts=False)  # what was interrupted may stay where it is


@pytest.mark.parametrize(
    "start", [pytest.param(start, marks=pytest.mark.slow if start % 4_000 else ()) for start in range(0, 20_000, 2_000)]
)
def test_interrupt_anywhere_in_the_engine(start: int) -> None:
    struck: list[int] = []

    def setup() -> Scenario:
        inner = _starting_over(lambda train: None)()

        def scenario() -> Any:
            for events in range(start + 1, start + 2_000, 97):
                training = Training(2)
                try:
                    with interrupted_inside("lowtide.dynamic", events):
                        training.steps(2)
                except KeyboardInterrupt:
                    struck.append(events)
                del training
            return inner()

        return scenario

    compare(setup)
    assert len(struck) > 10, "the program came to its end before it was interrupted"


def _training_with(between: Callable[[Training], None]) -> Callable[[], Scenario]:
    def setup() -> Scenario:
        training = Training()

        def scenario() -> Any:
            first = training.step(0)
            between(training)
            return first, training.steps(), training.state()

        return scenario

    return setup


def test_too_large_an_operator_is_refused_and_the_program_goes_on() -> None:
    """A smaller batch in the same context, as if the larger one had never been tried."""
    errors: list[lowtide.OnlineBudgetError] = []

    def attempt(training: Training) -> None:
        with pytest.raises(lowtide.OnlineBudgetError) as caught:
            training.data.repeat(8, 1, 1).add(1)
        errors.append(caught.value)

    expected = perform(_training_with(lambda training: None), contextlib.nullcontext())
    budget = expected.peak_bytes // 2
    actual = perform(_training_with(attempt), lowtide.online(budget))
    assert_same_values(actual.value, expected.value)
    assert torch.equal(actual.generator, expected.generator)
    assert actual.peak_bytes <= budget
    assert actual.final_bytes == expected.final_bytes
    (error,) = errors
    assert error.needed_bytes > error.budget_bytes == budget
    assert error.operator in str(error)
    assert "test_faults.py" in error.location
