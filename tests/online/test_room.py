"""Room made operator by operator, from what was observed: run on the CPU, whose counter tells whether it was enough."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch.nn.functional import conv3d

import lowtide
from examples.dynamic import load
from lowtide.dynamic import run, storages
from lowtide.dynamic.executor import Executor, Observed, PredictingExecutor
from lowtide.dynamic.memory import Memory
from lowtide.memory import cpu_allocator
from lowtide.memory.cpu_allocator import AllocationCounter
from tests.online.programs_support import assert_same, eager, train
from tests.online.scenarios import ROWS, TENSOR_BYTES, Scenario, Training, assert_same_values, chain, perform


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> AllocationCounter:
    """The meter of contexts, which make room as on a device whose allocator does not ask for it."""
    counter = cpu_allocator.install()
    assert counter is not None

    def executor_for(memory: Memory, device: torch.device, observed: Observed) -> Executor:
        return PredictingExecutor(memory, device, observed)

    monkeypatch.setattr(run, "executor_for", executor_for)
    return counter


class _Steps:
    """Training, and the peak of its later steps."""

    def __init__(self, counter: AllocationCounter) -> None:
        self.counter = counter
        self.training = Training()
        self.level_bytes = counter.level_bytes
        self.later_peak_bytes = 0

    def __call__(self) -> Any:
        first = self.training.steps(2)
        before, _ = self.counter.peak_bytes, self.counter.reset_peak()
        later = self.training.steps(4)
        self.later_peak_bytes = self.counter.peak_bytes - self.level_bytes
        self.counter.raise_peak(before)
        return first, later, self.training.state()


@pytest.mark.parametrize("share", [70, 45])
def test_training(counter: AllocationCounter, share: int) -> None:
    """Equal to the bit; once every signature was seen, within the budget to the byte."""
    made: list[_Steps] = []

    def setup() -> Scenario:
        made.append(_Steps(counter))
        return made[-1]

    expected, expected = (perform(setup, contextlib.nullcontext()) for _ in range(2))
    budget = expected.peak_bytes * share // 100
    session = lowtide.online(budget, warn_above=1e9)
    actual = perform(setup, session)
    assert_same_values(actual.value, expected.value)
    assert torch.equal(actual.generator, expected.generator)
    assert actual.final_bytes == expected.final_bytes
    assert session.statistics.evictions > 0
    _, eager_steps, steps = made
    assert steps.later_peak_bytes <= budget < eager_steps.later_peak_bytes


@pytest.mark.parametrize("name", ["lstm", pytest.param("treelstm", marks=pytest.mark.slow), "experts"])
def test_programs(counter: AllocationCounter, name: str) -> None:
    """Shapes that change from step to step: equal to the bit all the same."""
    expected = eager(name)
    session = lowtide.online(expected.peak_bytes // 2)
    outcome = train(load(name)(1), session)
    assert_same(outcome, expected)
    assert outcome.final_bytes == expected.final_bytes
    assert session.statistics.evictions > 0


def test_scratch_is_remembered(counter: AllocationCounter) -> None:
    """This convolution takes 28 times its result: too much at first sight, room for all of it from then on."""
    kernel = torch.randn(16, 16, 3, 3, 3)
    data = torch.randn(1, 16, 16, 32, 32)
    expected = conv3d(data, kernel)
    peak_bytes = lowtide.measure(lambda: conv3d(data, kernel)).peak_bytes
    budget = peak_bytes + 2 * TENSOR_BYTES
    with lowtide.online(budget) as session:
        tensors = chain()
        results = [conv3d(data, kernel)]
        assert session.statistics.peak_bytes > budget
        assert session.statistics.evictions == 0
        sums = [tensor.sum().item() for tensor in tensors]
        del results[:]
        counter.reset_peak()
        results.append(conv3d(data[..., :24].contiguous(), kernel))  # other geometry: room for scratch as large is made
        results.append(conv3d(data, kernel))
        assert session.statistics.peak_bytes <= budget
        assert session.statistics.evictions > 0
        assert [tensor.sum().item() for tensor in tensors] == sums
        assert torch.equal(results[1], expected)


def test_scratch_is_remembered_from_entry_to_entry(counter: AllocationCounter) -> None:
    """A context that is entered anew knows what it saw before, and exceeds its budget not once."""
    kernel, data = torch.randn(16, 16, 3, 3, 3), torch.randn(1, 16, 16, 32, 32)
    session = lowtide.online(lowtide.measure(lambda: conv3d(data, kernel)).peak_bytes + 2 * TENSOR_BYTES)
    peaks = []
    for _ in range(2):
        with session:
            tensors = chain()
            conv3d(data, kernel)
            del tensors
        peaks.append(session.statistics.peak_bytes)
    assert peaks[1] <= session.settings.budget_bytes < peaks[0]


def test_observed_costs_are_believed(counter: AllocationCounter) -> None:
    """Calls that are not observed count as long as those that were, and not as long as they take to start."""
    with lowtide.online("1GiB") as session:
        tensor = torch.randn(ROWS)
        for _ in range(50):
            tensor.exp()
        statistics = session.statistics
    assert statistics.operators == 51
    assert statistics.operator_ns == statistics.operators * 10_000


def test_a_call_that_failed_is_not_believed(counter: AllocationCounter) -> None:
    """The first call of the signature raises; what it costs is learnt from those that do not."""
    tensor = torch.randn(ROWS)
    outside, inside = torch.tensor([ROWS]), torch.tensor([0])
    with lowtide.online("1GiB") as session:
        with pytest.raises(IndexError):
            torch.ops.aten.index.Tensor(tensor, [outside])
        for _ in range(5):
            torch.ops.aten.index.Tensor(tensor, [inside])
        statistics = session.statistics
    assert statistics.operators == 5
    assert statistics.operator_ns == statistics.operators * 10_000


def test_refusal(counter: AllocationCounter) -> None:
    """An operator whose results cannot fit is not run, and the program goes on."""
    with lowtide.online(4 * TENSOR_BYTES):
        tensors = chain(3)
        with pytest.raises(lowtide.OnlineBudgetError, match="repeat") as caught:
            tensors[0].repeat(4, 1)
        assert caught.value.needed_bytes > caught.value.budget_bytes == 4 * TENSOR_BYTES
        sums = [tensor.sum().item() for tensor in tensors]
    assert sums == [tensor.sum().item() for tensor in chain(3)]


@pytest.mark.parametrize(
    ("device", "message"),
    [("abacus", "no device"), ("meta", "not of 'meta'"), ("cuda:99", "cuda:99', but PyTorch finds")],
)
def test_devices_without_budgets(device: str, message: str) -> None:
    with pytest.raises(lowtide.PlanError, match=message):
        lowtide.online("1GiB", device=device)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warn_above": "2"}, "warn_above is '2', but is a multiple"),
        ({"warn_above": -1}, "warn_above is -1"),
        ({"seed": "a"}, "seed is 'a', but must be an integer"),
        ({"heuristic": ["lru"]}, "no heuristic is named"),
        ({"record": 3}, "record is 3, but names a file"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(lowtide.PlanError, match=message):
        lowtide.online("1GiB", **options)


def _scripted(x: torch.Tensor) -> torch.Tensor:
    for _ in range(4):
        x = torch.exp(x) / (1.0 + x * x)
    return x


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning")
def test_torchscript_lets_no_exception_through() -> None:
    """It raises one of its own: what is said is that the budget is too small."""
    x = torch.rand(1 << 16, requires_grad=True)
    with pytest.raises(lowtide.OnlineBudgetError, match="at once") as caught, lowtide.online(2 * x.nbytes):
        torch.jit.script(_scripted)(x).sum().backward()
    assert "TorchScript interpreter" in str(caught.value.__cause__)


def test_a_warning_where_most_of_the_time_goes_into_recomputing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, however often more has been computed again."""
    monkeypatch.setattr(run, "_WARN_FROM_NS", 0)
    with (
        pytest.warns(UserWarning, match="the budget is too small for this program") as warned,
        lowtide.online(6 * TENSOR_BYTES, warn_above=0),
    ):
        tensors = chain()
        sums = [tensor.sum() for tensor in tensors[:4]]
        del tensors
    assert len(warned) == 1
    assert all(map(torch.equal, sums, [tensor.sum() for tensor in chain(3)]))


def test_the_memory_of_storages_is_exchanged_by_hand() -> None:
    """As before PyTorch 2.13, whichever it is."""
    one, other = torch.arange(5), torch.arange(5, 10)
    view = one[1:3]
    storages.swap_words(one.untyped_storage(), other.untyped_storage())
    assert (one.tolist(), other.tolist(), view.tolist()) == ([5, 6, 7, 8, 9], [0, 1, 2, 3, 4], [6, 7])
