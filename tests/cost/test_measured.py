"""Measured costs: byte-exact workspaces, real storages, nothing of the caller's disturbed."""

from __future__ import annotations

import gc
import logging
import math
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lowtide.capture import capture
from lowtide.cost import CostCache, analytical_costs, measure_costs, measured, timing
from lowtide.cost.room import measured_within
from lowtide.cost.signature import signature
from lowtide.memory.meter import allocation_peak, measure
from tests.cost.programs import program_of

aten = torch.ops.aten


def _costs(*calls: Any, **layouts: Any) -> Any:
    return measure_costs(program_of(*calls, **layouts), cache=CostCache(None))


def test_workspace_is_exact() -> None:
    costs = _costs(("y", aten.mul.Tensor, ("x", 2.5)), x=torch.empty(100, 100))
    assert costs.storage_bytes.tolist() == [0, 40000]
    assert costs.workspace_bytes.tolist() == [12]  # the number as a double and as a float
    assert costs.time_ns[0] > 0


@pytest.mark.parametrize(
    "call",
    [
        lambda x: aten.convolution.default(x, x[:4, :, :3, :3], None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
        lambda x: aten.sort.default(x),
        lambda x: aten.var_mean.correction(x, [1], correction=1),
        lambda x: aten._softmax.default(x, 1, False),
    ],
)
def test_peak_of_multiple_outputs_equals_the_real_call(call: Callable[[torch.Tensor], Any]) -> None:
    x = torch.randn(8, 4, 12, 12, dtype=torch.float64)
    call(x)
    peak, _ = allocation_peak(lambda: call(x))
    recorded: list[Any] = []

    class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            recorded.append((func, args, kwargs or {}))
            return func(*args, **(kwargs or {}))

    with Recorder():
        call(x)
    func, args, kwargs = recorded[-1]
    names = [f"a{i}" if isinstance(arg, torch.Tensor) else arg for i, arg in enumerate(args)]
    layouts = {f"a{i}": arg for i, arg in enumerate(args) if isinstance(arg, torch.Tensor)}
    costs = _costs(
        (("y", "z") if func in (aten.sort.default, aten.var_mean.correction) else "y", func, names, kwargs), **layouts
    )
    assert int(costs.storage_bytes.sum() + costs.workspace_bytes[0]) == peak


def test_views_cost_no_bytes_and_integers_are_valid_indices() -> None:
    costs = _costs(
        ("v", aten.view.default, ("x", [4, 25])),
        ("t", aten.t.default, ("v",)),
        ("e", aten.embedding.default, ("t", "i")),
        x=torch.empty(100),
        i=torch.zeros(7, dtype=torch.int64),
    )
    assert costs.storage_bytes.sum() == 7 * 4 * 4
    assert costs.workspace_bytes[:2].tolist() == [0, 0]


def test_where_an_operator_began_to_draw_comes_from_it() -> None:
    """An attention's gradient reads on the host what its forward pass put there, whatever the program says of its device."""
    library = torch.library.Library("seeds", "FRAGMENT")
    library.define("drawn(Tensor x) -> (Tensor output, Tensor philox_seed)")
    library.define("drawn_backward(Tensor gradient, Tensor philox_seed) -> Tensor")

    def backward(gradient: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
        assert (seed.item(), seed.device.type) == (1234, "cpu")  # of the program's it is not
        return gradient + 1

    library.impl("drawn", lambda x: (x + 1, torch.tensor(1234)), "CPU")
    library.impl("drawn_backward", backward, "CPU")
    try:
        drawn, again = torch.ops.seeds.drawn.default, torch.ops.seeds.drawn_backward.default
        program = program_of((("y", "seed"), drawn, ("x",)), ("z", again, ("y", "seed")), x=torch.empty(100))
        measure_costs(program, cache=CostCache(None))
        assert "<-seeds.drawn.default" in signature(program, 1)
    finally:
        library._destroy()


def test_equal_signatures_are_measured_once() -> None:
    texts: list[float] = []
    program = program_of(
        *((f"y{i}", aten.relu.default, ("x",)) for i in range(6)),
        x=torch.empty(50),
    )
    assert len({signature(program, op.id) for op in program.graph.ops}) == 1
    costs = measure_costs(program, cache=CostCache(None), on_progress=lambda text, fraction: texts.append(fraction))
    assert len(set(costs.time_ns.tolist())) == 1
    assert texts == [0.0, 1.0]


@pytest.mark.parametrize(
    ("exponents", "distinct"),
    [((0.1, 0.3, 1e-5, -0.7), 1), ((2.0, 3.0, 0.5, -0.5, 0.3), 5), ((math.inf, -math.inf, 0.3), 3)],
)
def test_numbers_that_no_kernel_treats_apart_share_a_measurement(exponents: tuple[float, ...], distinct: int) -> None:
    """A probability or a running average's weight that changes from step to step is not measured at every step."""
    program = program_of(
        *((f"y{i}", aten.pow.Tensor_Scalar, ("x", exponent)) for i, exponent in enumerate(exponents)),
        x=torch.empty(50),
    )
    assert len({signature(program, op.id) for op in program.graph.ops}) == distinct


@pytest.mark.parametrize(
    "call",
    [
        ("y", aten.bernoulli.default, ("x",)),
        ("y", aten.binary_cross_entropy.default, ("x", "x")),
        *([("y", aten.cholesky.default, ("x",))] if hasattr(aten, "cholesky") else ()),  # which PyTorch 2.15 has not
        ("y", aten.multinomial.default, ("x", 2)),
        ("y", aten.normal.Tensor_Tensor, ("x", "x")),
        ("y", aten.normal.float_Tensor, (0.0, "x")),
        ("y", aten.poisson.default, ("x",)),
    ],
    ids=lambda call: call[1].name(),
)
def test_arguments_of_a_small_domain_are_made_within_it(call: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Else the operator's cost would be estimated, its workspace too high."""
    costs = _costs(call, x=torch.eye(20))
    assert "estimated" not in caplog.text
    assert costs.time_ns[0] > 0


@pytest.mark.parametrize(
    ("call", "inputs"),
    [
        (("y", aten.binary_cross_entropy.default, ("x", "a")), {"x": torch.rand(20), "a": torch.rand(20)}),
        (
            ("y", aten.binary_cross_entropy.default, ("x", "a")),
            {"x": torch.rand(5, 4), "a": torch.rand(5, 1).expand(5, 4)},
        ),
        (
            ("y", aten.index_put.default, ("x", [None, "a"], "b")),
            {"x": torch.zeros(3, 8), "a": torch.arange(8) < 5, "b": torch.ones(3, 5)},
        ),
        (
            ("y", aten.index_put.default, ("x", ["a"], "b")),
            {"x": torch.zeros(8, 3), "a": torch.arange(8) < 5, "b": torch.ones(5, 3)},
        ),
        (
            (("y", "z"), aten._ctc_loss.Tensor, ("x", "a", "c", "b")),
            {
                "x": torch.zeros(9, 3, 4),
                "a": torch.ones(7, dtype=torch.int64),
                "b": torch.tensor([2, 2, 3]),
                "c": torch.full((3,), 9),
            },
        ),
    ],
    ids=[
        "two of probabilities",
        "an expanded one",
        "of later dimensions",
        "as many as a mask selects",
        "targets one behind the other",
    ],
)
def test_arguments_that_fit_each_other(
    call: Any, inputs: dict[str, torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    costs = measure_costs(program_of(call, **inputs), cache=CostCache(None))
    assert "estimated" not in caplog.text
    assert costs.time_ns[0] > 0


def test_a_number_that_sizes_the_result_has_a_measurement_of_its_own() -> None:
    program = program_of(
        ("a", aten.arange.start_step, (0, 10, 0.3), {"device": "cpu"}),
        ("b", aten.arange.start_step, (0, 10, 0.1), {"device": "cpu"}),
        x=torch.empty(50),
    )
    assert len({signature(program, op.id) for op in program.graph.ops}) == 2


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([(100, 10)], 100),  # steady: once
        ([(100, 90), (40, 1)], 40),  # disturbed, then not
        ([(100, 90), (400, 300), (60, 50), (80, 2)], 60),  # the least, though it scattered too
        ([(100, 90), (90, 80), (80, 70), (70, 60)], 70),  # never steady: not for ever
    ],
)
def test_scattered_times_are_taken_again(
    monkeypatch: pytest.MonkeyPatch, runs: list[tuple[int, int]], expected: int
) -> None:
    """``runs``: (time, spread) of every round of repetitions, by the clock of a busy machine."""
    left = list(runs)

    def time_call(call: Callable[[], Any], *_: Any) -> timing.Timing:
        peak, _ = allocation_peak(call)
        return timing.Timing(*left.pop(0), peak)

    monkeypatch.setattr(measured, "time_call", time_call)
    costs = _costs(("y", aten.relu.default, ("x",)), x=torch.empty(50))
    assert costs.time_ns.tolist() == [expected]
    assert not left


@pytest.mark.parametrize("disturbed", [1, 7, 14])
def test_repetitions_that_others_slow_down_do_not_count(disturbed: int) -> None:
    """Up to two thirds of them."""
    samples = [100 + 1000 * (index < disturbed) + index % 3 for index in range(21)]
    assert timing._summary(samples, 0).time_ns in range(100, 103)


@pytest.mark.parametrize(
    ("milliseconds", "peaks", "expected"),
    [
        ([70] * 9, [7], 5),  # short ones
        ([300, 310, 320], [7], 2),
        ([90, 90, 150, 160, 170], [7], 4),  # until they have taken long enough
        ([300, 310, 320, 330, 340], [7, 8], 5),  # which of the peaks is its own?
    ],
)
def test_what_takes_long_is_repeated_less_often(
    monkeypatch: pytest.MonkeyPatch, milliseconds: list[int], peaks: list[int], expected: int
) -> None:
    """By the clock of a test."""
    runs = [(time * 1_000_000, peaks[number % len(peaks)]) for number, time in enumerate(milliseconds)]
    left = iter(runs)
    monkeypatch.setattr(timing, "_on_cpu", lambda call: next(left))
    found = timing.time_call(lambda: None, torch.device("cpu"), 1)
    assert len([*left]) == len(milliseconds) - expected
    assert milliseconds[0] * 1_000_000 <= found.time_ns <= milliseconds[expected - 1] * 1_000_000


def test_the_peak_is_that_of_one_repetition() -> None:
    """Neither what repetitions leave behind is in it, nor is what was freed meanwhile missing."""
    left: list[torch.Tensor] = []
    freed = [torch.empty(10_000, dtype=torch.uint8) for _ in range(2)]

    def call() -> torch.Tensor:
        del freed[-1:]
        left.append(torch.empty(300, dtype=torch.uint8))
        return torch.empty(1000, dtype=torch.uint8)

    assert timing.time_call(call, torch.device("cpu"), 1).peak_bytes == 1300


@pytest.mark.parametrize(("spikes", "expected"), [((3,), 1000), ((0,), 1000), ((1, 3), 6000)])
def test_what_another_thread_allocates_once_is_not_in_the_peak(spikes: tuple[int, ...], expected: int) -> None:
    calls = iter(range(100))

    def call() -> torch.Tensor:
        made = torch.empty(1000, dtype=torch.uint8)
        if next(calls) in spikes:
            thread = threading.Thread(target=torch.empty, args=(5000,), kwargs={"dtype": torch.uint8})
            thread.start()
            thread.join()
        return made

    assert timing.time_call(call, torch.device("cpu"), 1).peak_bytes == expected


def test_garbage_is_not_collected_while_operators_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    collections: list[int] = []
    calls: list[int] = []

    def collected(phase: str, _: Any) -> None:
        collections.append(len(calls))

    def measure_operator(*args: Any) -> Any:
        gc.callbacks.append(collected)
        calls.append(len([[] for _ in range(10 * before[0])]))  # that would be looked at many times
        gc.callbacks.remove(collected)
        return original(*args)

    original, before = measured.measure_operator, gc.get_threshold()
    monkeypatch.setattr(measured, "measure_operator", measure_operator)
    _costs(("y", aten.relu.default, ("x",)), x=torch.empty(50))
    assert calls and not collections
    assert gc.isenabled() and gc.get_threshold() == before


def test_no_operator_leaves_its_tensors_to_the_next() -> None:
    """Ten operators of other sizes each, one after the other: the most is one argument, one result and small change."""
    rows = [1000 + i for i in range(10)]
    program = program_of(
        *((f"y{n}", aten.tanh.default, (f"x{n}",)) for n in rows), **{f"x{n}": torch.empty(n, 100) for n in rows}
    )
    peak = measure(lambda: measure_costs(program, cache=CostCache(None))).peak_bytes
    largest = rows[-1] * 100 * 4
    assert 2 * largest <= peak < 2 * largest + 16 * 1024


def test_generators_and_modes_are_untouched() -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    with torch.enable_grad():
        _costs(("y", aten.bernoulli.p, ("x", 0.5)), x=torch.empty(1000))
        assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), state)


def test_an_operator_that_fails_is_estimated(caplog: pytest.LogCaptureFixture) -> None:
    def picky(tensor: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("not on these values")

    with caplog.at_level(logging.WARNING):
        calls = [(f"y{size}", picky, (f"x{size}",), {}, torch.empty(size)) for size in (10, 20)]
        costs = _costs(*calls, x10=torch.empty(10), x20=torch.empty(20))
    assert caplog.text.count("not on these values") == 1  # however many there are of it
    assert costs.time_ns[0] > 0
    assert costs.workspace_bytes[0] >= 80


def test_real_storages_larger_than_captured_are_charged() -> None:
    def generous(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(1000)[:10]

    costs = _costs(("y", generous, ("x",), {}, torch.empty(10)), x=torch.empty(10))
    assert costs.storage_bytes.tolist() == [0, 4000]
    assert costs.workspace_bytes.tolist() == [0]


def test_a_copy_that_was_captured_as_a_view_is_charged(caplog: pytest.LogCaptureFixture) -> None:
    def copies(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    base = torch.empty(10)
    costs = _costs(
        ("b", aten.relu.default, ("x",), {}, base), ("y", copies, ("b",), {}, base.view(2, 5)), x=torch.empty(10)
    )
    assert "captured as a view" in caplog.text
    assert costs.storage_bytes.tolist() == [0, 80]


def test_records_are_kept_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path))
    program = program_of(("y", aten.relu.default, ("x",)), x=torch.empty(50))
    first = measure_costs(program)
    assert [name.startswith("costs-") for name in sorted(os.listdir(tmp_path / "costs")) if name.endswith(".json")] == [
        True
    ]
    assert measure_costs(program).time_ns.tolist() == first.time_ns.tolist()


@pytest.mark.parametrize("at_other_sizes", [False, True])
def test_operators_that_there_is_no_room_for_do_not_run(at_other_sizes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they take is estimated, what fits is measured."""
    monkeypatch.setattr(measured, "_BYTES", {})
    program = program_of(
        ("y", aten.mul.Tensor, ("x", 2.5)), ("z", aten.slice.Tensor, ("y", 0, 0, 2)), ("w", aten.mul.Tensor, ("z", 2.5)),
        x=torch.empty(100, 100),
    )  # fmt: skip
    allocation_peak(lambda: measured.measure_costs(program, cache=CostCache(None)))  # what measuring itself keeps
    monkeypatch.setattr(measured, "_BYTES", {})
    found: list[Any] = []

    def measuring() -> None:
        like = analytical_costs(program)
        with measured_within(lambda _: 10_000):
            found.append(
                measured.measure_bytes(program, like)
                if at_other_sizes
                else measure_costs(program, cache=CostCache(None))
            )

    assert allocation_peak(measuring)[0] < 10_000
    assert found[0].storage_bytes.tolist() == [0, 40000, 800]
    assert found[0].workspace_bytes.tolist() == [16, 0, 12]  # 16 is the estimate


def test_recurrent_layers_run_whatever_room_there_seems_to_be() -> None:
    """It seems to be less than there is: only what runs says how much it keeps for the backward pass."""
    program = capture(torch.nn.LSTM(16, 32, bidirectional=True), (torch.randn(20, 4, 16),)).program
    freely = measure_costs(program, cache=CostCache(None))
    with measured_within(lambda _: 1):
        within = measure_costs(program, cache=CostCache(None))
    recurrent = ["mkldnn_rnn_layer" in signature(program, op.id) for op in program.graph.ops]
    assert sum(recurrent) == 4
    assert np.array_equal(freely.workspace_bytes[recurrent], within.workspace_bytes[recurrent])
    assert freely.storage_bytes.sum() == within.storage_bytes.sum()


def test_no_memory_is_kept() -> None:
    """It would come on top of the step that is planned."""
    _costs(("y", aten.add.Tensor, ("x", "x")), x=torch.empty(10))  # what is made once in a process
    program = program_of(("y", aten.mul.Tensor, ("x", 2.5)), x=torch.empty(100, 100, dtype=torch.float64))
    _, kept = allocation_peak(lambda: measure_costs(program, cache=CostCache(None)) and None)
    assert kept == 0
