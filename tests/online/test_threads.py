"""Threads and processes beside a context: workers of a loader, a user's threads with contexts of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import lowtide
from tests.online.scenarios import ROWS, TENSOR_BYTES, WIDTH, Scenario, Training, chain, compare

JOIN_SECONDS = 120


class _Rows(Dataset[torch.Tensor]):
    """Random rows, other ones in every worker."""

    def __len__(self) -> int:
        return 4 * ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(WIDTH) + index / ROWS


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_data_loader(workers: int, persistent: bool) -> None:
    if persistent and not workers:
        pytest.skip("no workers to keep")

    def setup() -> Scenario:
        training = Training()
        loader = DataLoader(_Rows(), batch_size=ROWS, shuffle=True, num_workers=workers, persistent_workers=persistent)

        def scenario() -> Any:
            losses = []
            for _ in range(2):
                for batch in loader:
                    training.data = batch[None]
                    losses.append(training.step(0))
            del training.data, batch
            return losses, training.state()

        return scenario

    compare(setup)


def _in_threads(*functions: Callable[[], Any]) -> list[Any]:
    """Run all at once; the first exception of any is raised here."""
    results: list[Any] = [None] * len(functions)
    errors: list[BaseException] = []

    def call(index: int) -> None:
        try:
            results[index] = functions[index]()
        except BaseException as error:  # noqa: BLE001 - handed over to the test
            errors.append(error)

    threads = [threading.Thread(target=call, args=(index,)) for index in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_SECONDS)
        assert not thread.is_alive()
    if errors:
        raise errors[0]
    return results


def _sums(repeats: int = 3) -> list[float]:
    return [tensor.sum().item() for _ in range(repeats) for tensor in chain()]


def test_a_thread_under_its_own_context() -> None:
    expected = _sums()
    session = lowtide.online(8 * TENSOR_BYTES)

    def run() -> list[float]:
        with session:
            return _sums()

    measured: list[list[float]] = []
    peak = lowtide.measure(lambda: measured.extend(_in_threads(run))).peak_bytes
    assert measured == [expected]
    assert peak <= 8 * TENSOR_BYTES
    assert session.statistics.evictions > 0


def test_a_plain_thread_beside_a_context() -> None:
    """A thread that entered nothing computes as ever, while another one works inside a budget."""
    expected = _sums()

    def inside() -> list[float]:
        with lowtide.online(60 * TENSOR_BYTES):
            return _sums()

    assert _in_threads(inside, _sums) == [expected, expected]


def test_two_threads_under_contexts_of_their_own() -> None:
    """Each counts what both allocate, as the allocator is one."""
    expected = _sums()

    def run() -> list[float]:
        with lowtide.online(40 * TENSOR_BYTES):
            return _sums()

    assert _in_threads(run, run) == [expected, expected]


def test_two_threads_under_one_context() -> None:
    expected = _sums()
    session = lowtide.online(40 * TENSOR_BYTES)

    def run() -> list[float]:
        with session:
            return _sums()

    assert _in_threads(run, run) == [expected, expected]
    with session:
        assert _sums() == expected


def test_backward_in_a_thread() -> None:
    """A graph made under a context, whose backward pass another thread runs under the same mode or after leaving."""
    training, reference = Training(), Training()
    reference.model.load_state_dict(training.model.state_dict())
    reference.data = training.data
    torch.manual_seed(4)
    reference.loss(0).backward()
    torch.manual_seed(4)
    with lowtide.online(24 * TENSOR_BYTES) as session:
        loss = training.loss(0)
    assert session.statistics.evictions > 0
    _in_threads(loss.backward)
    for name, tensor in reference.state().items():
        assert torch.equal(tensor, training.state()[name]), name
