"""The meter is exact to the byte, in every thread, and leaves no trace."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading

import pytest
import torch

from lowtide.errors import PlanError
from lowtide.memory import cpu_allocator, meter
from lowtide.memory.meter import allocation_peak, measure


def test_peak_and_final_level_are_exact() -> None:
    def call() -> torch.Tensor:
        first = torch.empty(1001, dtype=torch.uint8)
        second = torch.empty(503, dtype=torch.uint8)
        del first
        return second

    measurement = measure(call)
    assert (measurement.peak_bytes, measurement.final_bytes) == (1504, 503)
    assert [level for _, level in measurement.timeline] == [1001, 1504, 503]
    assert allocation_peak(call) == (1504, 503)


def test_what_cannot_be_called() -> None:
    with pytest.raises(PlanError, match=r"measure takes a function .*, not a Tensor: measure\(step\)"):
        measure(torch.ones(1))  # type: ignore[arg-type]


def test_arguments_are_passed_and_time_is_positive() -> None:
    measurement = measure(torch.zeros, 10, 3, dtype=torch.float64)
    assert measurement.peak_bytes == 240
    assert measurement.time_ns > 0
    assert measurement.device == "cpu"


def test_operator_internal_allocations_are_seen() -> None:
    probabilities = torch.rand(64, 64)
    peak, final = allocation_peak(lambda: torch.ops.aten.add.Tensor(probabilities, 1.5))
    assert (peak, final) == (64 * 64 * 4 + 12, 64 * 64 * 4)  # the number as a double and as a float
    inputs, weight = torch.rand(1, 3, 16, 16).double(), torch.rand(8, 3, 3, 3).double()
    peak, final = allocation_peak(lambda: torch.conv2d(inputs, weight))
    assert peak >= final + 14 * 14 * 27 * 8  # the unfolded input


def test_agrees_with_the_profiler() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Flatten())
    inputs = torch.rand(2, 3, 16, 16)

    def step() -> None:
        model(inputs).square().sum().backward()

    step()
    model.zero_grad()  # outside: the profiler would not see these blocks go
    exact = measure(step)
    model.zero_grad()
    with pytest.warns(UserWarning, match="not available"):
        events, _ = meter._profile(step)
    profiled = [level for _, level in events]
    assert (exact.peak_bytes, exact.final_bytes) == (max(profiled), profiled[-1])


def test_plain_threads_are_counted() -> None:
    def call() -> None:
        thread = threading.Thread(target=lambda: torch.empty(70001, dtype=torch.uint8))
        thread.start()
        thread.join()

    assert measure(call).peak_bytes == 70001


def test_release_in_another_thread_and_of_older_blocks() -> None:
    cpu_allocator.install()
    held = [torch.empty(5000, dtype=torch.uint8)]

    def call() -> None:
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()
        torch.empty(6000, dtype=torch.uint8)

    measurement = measure(call)
    assert measurement.peak_bytes == 1000
    assert measurement.final_bytes == -5000


def test_many_threads_balance() -> None:
    def churn() -> None:
        for size in range(1, 2000):
            torch.empty(size, dtype=torch.uint8)

    def call() -> None:
        threads = [threading.Thread(target=churn) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    measurement = measure(call)
    assert measurement.final_bytes == 0
    assert 1999 <= measurement.peak_bytes <= 8 * 1999
    assert measurement.peak_bytes == max(level for _, level in measurement.timeline)


def test_nested_measurements_do_not_disturb_each_other() -> None:
    inner = []

    def call() -> None:
        torch.empty(900, dtype=torch.uint8)
        inner.append(measure(torch.empty, 100, dtype=torch.uint8).peak_bytes)
        inner.append(allocation_peak(lambda: torch.empty(200, dtype=torch.uint8))[0])

    assert measure(call).peak_bytes == 900
    assert inner == [100, 200]


def test_an_exception_passes_and_the_meter_goes_on() -> None:
    def fail() -> None:
        torch.empty(400, dtype=torch.uint8)
        raise KeyError("from the call")

    with pytest.raises(KeyError):
        measure(fail)
    with pytest.raises(RuntimeError, match="allocate"):
        measure(torch.empty, 1 << 55, dtype=torch.uint8)
    assert measure(torch.empty, 300, dtype=torch.uint8).peak_bytes == 300


def test_resize_sharing_and_empty_tensors() -> None:
    def call() -> torch.Tensor:
        torch.empty(0)
        return torch.empty(10, dtype=torch.uint8).resize_(100)

    assert allocation_peak(call) == (110, 100)
    shared, final = allocation_peak(lambda: torch.zeros(50, dtype=torch.uint8).share_memory_())
    assert (shared, final) == (50, 0)


def test_without_the_counter_the_profiler_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_allocator, "install", lambda: None)
    with pytest.warns(UserWarning, match="plain Python threads"):
        measurement = measure(lambda: torch.empty(1001, dtype=torch.uint8))
    assert (measurement.peak_bytes, measurement.final_bytes) == (1001, 1001)
    with pytest.warns(UserWarning):
        assert allocation_peak(lambda: torch.empty(99, dtype=torch.uint8)) == (99, 99)


def test_tensors_outlive_the_interpreter() -> None:
    script = (
        "import torch, lowtide.memory.meter as m\n"
        "print(m.measure(torch.empty, 7, dtype=torch.uint8).peak_bytes)\n"
        "torch.kept = torch.empty(1000); torch._C.kept = torch.nn.Linear(9, 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "7"), done.stderr


@pytest.mark.gpu
def test_cuda_peak() -> None:
    measurement = measure(lambda: torch.empty(1 << 20, dtype=torch.uint8, device="cuda"))
    assert measurement.peak_bytes == 1 << 20
    assert measurement.device.startswith("cuda")


class _Cycle:
    """Garbage whose finalizer makes garbage in turn: one collection does not free it."""

    def __init__(self) -> None:
        self.block = torch.empty(1000, dtype=torch.uint8)
        self.itself = self

    def __del__(self) -> None:
        cycle: list[object] = [self.block]
        cycle.append(cycle)


def test_garbage_of_before_is_no_part_of_a_measurement() -> None:
    _Cycle()

    def call() -> torch.Tensor:
        for _ in range(3):
            gc.collect()
        return torch.empty(10, dtype=torch.uint8)

    measured = measure(call)
    assert (measured.peak_bytes, measured.final_bytes) == (10, 10)
