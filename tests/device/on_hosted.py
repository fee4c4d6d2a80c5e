"""What runs on the device ``hosted``, in a process of its own: ``test_hosted.py`` starts it."""

from __future__ import annotations

import copy
import gc
import json
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

import lowtide
from benchmarks import gpu
from benchmarks.compare import worker
from benchmarks.compare.models import COMPARED, Compared
from benchmarks.models import MODELS
from benchmarks.sweep import problems
from benchmarks.sweep_model import sweep_model
from lowtide.cli.main import main as command_line
from lowtide.cost.timing import time_call
from lowtide.device import Accelerator, accelerator_in_use, accelerators, find, interface_of
from lowtide.ir import Compute
from lowtide.memory.allocators import PeakWindow, device_memory, free_memory, meter_of, round_up
from lowtide.offload.host import HostMemory
from lowtide.runtime.calls.call import ModelCall
from lowtide.runtime.updates.away import AwayTensor
from tests.device import hosted
from tests.device.models import Block, Deciding, Mean
from tests.support.leases import let_go_inside_a_lease
from tests.support.training import QUICK
from tests.support.wide import pairs

hosted.register()

FIRST, SECOND = torch.device("hosted", 0), torch.device("hosted", 1)
TOTAL_BYTES = 8 << 30
KIB = 1 << 10


@pytest.fixture(autouse=True)
def _clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Seeds, an own cache, and every byte of both devices given back."""
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    yield
    torch.accelerator.set_device_index(0)
    torch.ops.hosted.set_total(0, TOTAL_BYTES)
    gc.collect()


def transformer() -> nn.Module:
    torch.manual_seed(0)
    return Mean(*(Block() for _ in range(2)), nn.Linear(32, 8))


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    stages = [
        layer
        for before, after in ((3, 8), (8, 8), (8, 8), (8, 8), (8, 8))
        for layer in (nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.GELU(), nn.Dropout(0.1))
    ]
    return Mean(*stages, nn.MaxPool2d(2), nn.ConvTranspose2d(8, 4, 2, 2), nn.Flatten(), nn.Linear(4 * 12 * 12, 10))


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return Mean(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU())))


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "transformer": (transformer, (8, 16, 32)),
    "convolutions": (convolutions, (8, 3, 12, 12)),
}


def case(name: str, device: torch.device = FIRST) -> tuple[nn.Module, torch.Tensor]:
    make, shape = CASES[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return make().to(device), x.to(device)


def trained(model: nn.Module, x: torch.Tensor, steps: int = 3, *, autocast: bool = False) -> list[torch.Tensor]:
    """Losses, then parameters and buffers."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    torch.hosted.manual_seed_all(2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("hosted", torch.bfloat16, enabled=autocast):
            loss = model(x)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    model.zero_grad()
    return [*losses, *(parameter.detach() for parameter in model.parameters()), *model.buffers()]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def step_peak(model: nn.Module, x: torch.Tensor) -> int:
    model.zero_grad()
    found = lowtide.measure(lambda: model(x).backward())
    model.zero_grad()
    assert found.device == str(x.device)
    return found.peak_bytes


# --- the interface -------------------------------------------------------------------------------------------------------


def test_interface() -> None:
    found = interface_of(torch.device("hosted"))
    assert isinstance(found, Accelerator)
    assert found is interface_of(FIRST) is accelerator_in_use() is find("hosted")
    assert (found.name(), found.granularity_bytes, found.total_bytes()) == ("hosted", 256, TOTAL_BYTES)
    assert [each.device for each in accelerators()] == [FIRST, SECOND]
    torch.accelerator.set_device_index(1)
    assert interface_of(torch.device("hosted")).device == find("hosted").device == SECOND
    with pytest.raises(lowtide.PlanError, match="finds 2 of type 'hosted'"):
        find("hosted:2")


@pytest.mark.parametrize("device", [FIRST, SECOND])
def test_memory(device: torch.device) -> None:
    meter = meter_of(device)
    assert meter is not None
    free = free_memory(device)
    assert free is not None
    level = meter.level_bytes
    with PeakWindow(meter) as window:
        block = torch.empty(1000, dtype=torch.uint8, device=device)
        assert meter.level_bytes - level == round_up(1000, device) == 1024
        assert free_memory(device) == free - 1024
        with PeakWindow(meter) as inner:
            del block
            assert inner.peak_bytes == 0
        assert (window.level_bytes, window.peak_bytes) == (0, 1024)
    assert device_memory(device) == TOTAL_BYTES


@pytest.mark.parametrize("device", [FIRST, SECOND])
def test_clock_and_generator(device: torch.device) -> None:
    found = interface_of(device)
    found.synchronize()
    assert found.timed_ns(lambda: torch.ones(1000, device=device).sum()) > 0
    assert found.generator().device == device
    state = found.generator().get_state()
    first = torch.rand(5, device=device)
    found.generator().set_state(state)
    assert torch.equal(torch.rand(5, device=device), first)


# --- planned -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "device"), pairs(CASES, (FIRST, SECOND)))
def test_rematerialized(name: str, device: torch.device) -> None:
    """Equal to the bit, with dropout from the device's generator; the measured peak is the predicted one."""
    model, x = case(name, device)
    torch.accelerator.set_device_index(device.index)
    expected = trained(copy.deepcopy(model), x)
    generator = interface_of(device).generator()
    after = generator.get_state()
    budgeted = lowtide.rematerialize(copy.deepcopy(model), (x,), budget="60%", on_capture_error="error")
    assert torch.equal(generator.get_state(), after)
    assert equal(trained(budgeted, x), expected)
    assert torch.equal(generator.get_state(), after)
    (plan,) = lowtide.plans(budgeted)
    assert plan.overhead > 0
    assert step_peak(budgeted, x) == plan.peak_bytes <= plan.budget_bytes


@pytest.mark.parametrize(("name", "device"), pairs(CASES, (FIRST, SECOND)))
def test_moved_to_the_host(name: str, device: torch.device) -> None:
    """By streams of their own, and back; also while several calls wait for their backward passes."""
    model, x = case(name, device)
    eager = copy.deepcopy(model)
    options: dict[str, Any] = {"budget": "50%", "planner": "offload{effort=0}", "offload": "cpu"}
    lowtide.rematerialize(model, (x,), **options)
    (plan,) = lowtide.plans(model)
    assert plan.schedule.moves
    assert equal(trained(model, x), trained(eager, x))
    assert step_peak(model, x) <= plan.peak_bytes
    found = []
    for one in (model, eager):
        torch.hosted.manual_seed_all(3)
        first, second = one(x), one(2 * x)
        first.backward()
        second.backward()
        found.append([first.detach(), second.detach(), *(p.grad for p in one.parameters() if p.grad is not None)])
    assert equal(*found)
    with pytest.raises(lowtide.PlanError, match='use offload="cpu"'):
        lowtide.rematerialize(case(name, device)[0], (x,), **options | {"offload": "disk"})


@pytest.mark.parametrize("device", [FIRST, pytest.param(SECOND, marks=pytest.mark.slow)])
def test_states_of_an_optimizer_on_the_host(device: torch.device) -> None:
    """Between updates; the same results, predicted to the byte."""
    torch.manual_seed(0)
    model = Mean(*(nn.Linear(64, 64) for _ in range(8))).to(device)
    eager, x = copy.deepcopy(model), torch.ones(16, 64, device=device)
    ours, theirs = (torch.optim.Adam(one.parameters(), lr=1e-2) for one in (model, eager))
    held = sum(one.nbytes for one in (*model.parameters(), x))
    options: dict[str, Any] = {"total_budget": held + 10 * 64 * 64 * 4, "planner": "auto{effort=0}", "offload": "cpu"}
    lowtide.rematerialize(model, (x,), **options, optimizer=ours)
    for _ in range(3):
        losses = []
        for one, optimizer in ((model, ours), (eager, theirs)):
            losses.append(one(x))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        assert equal([losses[0].detach()], [losses[1].detach()])
    assert equal([*model.parameters()], [*eager.parameters()])
    assert sum(isinstance(v, AwayTensor) for state in ours.state.values() for v in state.values()) == 16
    saved = ours.state_dict()["state"]
    expected = theirs.state_dict()["state"]
    assert equal([saved[i]["exp_avg"] for i in saved], [expected[i]["exp_avg"] for i in expected])
    (plan,) = lowtide.plans(model)
    assert lowtide.measure(lambda: model(x).backward()).peak_bytes == plan.peak_bytes


def test_room_on_the_host() -> None:
    """Blocks that are too small make room for larger ones, and leases come back whatever the thread is doing."""
    memory = HostMemory(FIRST)
    blocks = []
    for count in (1, 2, 3):
        lease = memory.lease(count << 20)
        blocks.append(weakref.ref(lease.block))
        del lease
    assert [block() is None for block in blocks] == [True, True, False]
    lease = memory.lease(1 << 20)
    assert lease.block is blocks[-1]()
    leases = [lease]
    del lease
    let_go_inside_a_lease(memory, leases)
    assert memory.free_bytes() >= 3 << 20


def test_autocast() -> None:
    """Casts that autocast keeps are shared as in eager, on any type of device."""
    model, x = case("transformer")
    budgeted = lowtide.rematerialize(copy.deepcopy(model), budget="70%", on_capture_error="error")
    expected = trained(copy.deepcopy(model), x, autocast=True)
    assert equal(trained(budgeted, x, autocast=True), expected)
    assert not equal(trained(model, x), expected)


class Summing(nn.Module):
    """Sums that a GPU takes in another order each time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.zeros_like(x).index_add(0, index, layer(torch.tanh(torch.sin(x)))).cumsum(0)
        return x.square().mean()


def test_what_does_not_repeat_its_bits_runs_once() -> None:
    """On a device like this one, unless PyTorch is told to take operators that do."""
    model, x, index = Summing(), torch.randn(256, 32), torch.randint(256, (256,))

    def run_once(device: torch.device) -> list[str]:
        plan = lowtide.plan(model.to(device), (x.to(device), index.to(device)), budget="80%", planner=QUICK)
        times = Counter(step.op for step in plan.schedule.steps if isinstance(step, Compute))
        once = [op for op in plan.graph.ops if op.once]
        assert all(times[op.id] == 1 for op in once)
        assert max(times.values()) > 1
        return sorted({op.target.split(".")[1] for op in once})

    assert run_once(FIRST) == ["cumsum", "index_add"]
    assert run_once(torch.device("cpu")) == []
    torch.use_deterministic_algorithms(True)
    try:
        assert run_once(FIRST) == []
    finally:
        torch.use_deterministic_algorithms(False)


def test_stages_run_where_gradients_are_accumulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the thread of the device, in one order: hooks (those of DDP, say) issue collectives, and so may stages."""
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.GELU()))).to(FIRST)
    x, seen, stage = torch.randn(64, 32, device=FIRST), list[tuple[Any, int]](), ModelCall.stage

    def noted(call: ModelCall, node: int) -> Any:
        seen.append((node, threading.get_ident()))
        return stage(call, node)

    for number, parameter in enumerate(model.parameters()):
        note = lambda _, number=number: seen.append((f"hook {number}", threading.get_ident()))  # noqa: E731
        parameter.register_post_accumulate_grad_hook(note)
    monkeypatch.setattr(ModelCall, "stage", noted)
    lowtide.rematerialize(model, (x,), budget="70%", planning="wait")
    orders = set()
    for _ in range(20):
        seen.clear()
        model(x).sum().backward()
        orders.add(tuple(what for what, _ in seen))
        assert len({thread for _, thread in seen} - {threading.get_ident()}) == 1
        assert threading.get_ident() not in {thread for _, thread in seen}
    assert len(orders) == 1


@pytest.mark.parametrize("device", [FIRST, pytest.param(SECOND, marks=pytest.mark.slow)])
def test_parts(device: torch.device) -> None:
    """A model in parts stays within its budget where its own device is, current or not."""
    model, x = Deciding(blocks=2).to(device), torch.randn(8, 16, 32, device=device)
    expected = trained(copy.deepcopy(model), x)
    budget = step_peak(copy.deepcopy(model), x) * 85 // 100
    budgeted = lowtide.rematerialize(copy.deepcopy(model), budget=budget)
    assert equal(trained(budgeted, x), expected)
    assert len(lowtide.plans(budgeted)) == 2
    assert step_peak(budgeted, x) <= budget


@pytest.mark.slow
def test_other_shapes() -> None:
    """Each batch size by a plan of its own, those that are derived from others included, and better plans between calls."""
    model = perceptron().to(FIRST)
    plain, budgeted = copy.deepcopy(model), lowtide.rematerialize(copy.deepcopy(model), budget="60%")
    for batch in range(3, 8):
        x = torch.randn(64 * batch, 64, device=FIRST)
        assert equal(trained(budgeted, x, 2), trained(plain, x, 2))
    lowtide.wait(budgeted)
    assert equal(trained(budgeted, x, 2), trained(plain, x, 2))
    assert len(lowtide.plans(budgeted)) == 5
    assert step_peak(budgeted, x) == lowtide.plans(budgeted)[-1].peak_bytes


@pytest.mark.slow
def test_backend_of_compile() -> None:
    model, x = case("transformer")
    expected = trained(copy.deepcopy(model), x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Dynamo's own
        compiled = torch.compile(
            copy.deepcopy(model), backend="lowtide", options={"budget": "70%", "compiler": "eager"}
        )
        assert equal(trained(compiled, x), expected)


class Scaled(nn.Module):
    """Its first input is a number on the host."""

    def forward(self, scale: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for _ in range(4):
            x = nn.functional.dropout(torch.tanh(x @ weight) * scale, 0.3)
        return x.square().mean(), x.sum()


@pytest.mark.parametrize("second", [False, True])
def test_numbers_on_the_host(second: bool) -> None:
    """They do not make the program one of the CPU's: dropout is drawn from the device's generator, also where the forward pass
    is run anew for gradients that no plan expected, and the device's autocast counts."""
    scale, x = torch.tensor(2.0), torch.randn(64, 64, device=FIRST)
    results = []
    for budgeted in (False, True):
        model, weight = Scaled(), torch.full((64, 64), 0.1, device=FIRST, requires_grad=True)
        if budgeted:
            lowtide.rematerialize(model, (scale, x, weight), budget="80%", on_capture_error="error")
        torch.hosted.manual_seed_all(3)
        torch.manual_seed(4)
        found = []
        for autocast in (False, True, False):
            with torch.autocast("hosted", torch.bfloat16, enabled=autocast):
                outputs = model(scale, x, weight)
            torch.rand(3, device=FIRST)
            outputs[second].backward()
            found += [outputs[0].detach(), weight.grad.clone()]
        results.append([*found, torch.rand(3, device=FIRST)])
    assert equal(*results)


def test_budgets_of_the_device() -> None:
    """``total_budget`` counts what lies on the device, and no budget is above its memory."""
    model, x = case("transformer")
    with pytest.raises(lowtide.PlanError, match=f"more than the device hosted:0 has .{TOTAL_BYTES} bytes"):
        lowtide.rematerialize(copy.deepcopy(model), (x,), budget="9GiB", on_capture_error="error")
    level = meter_of(FIRST).level_bytes
    peak = step_peak(model, x)
    total = level + 3 * peak
    budgeted = lowtide.rematerialize(copy.deepcopy(model), (x,), total_budget=total, on_capture_error="error")
    (plan,) = lowtide.plans(budgeted)
    held = sum(round_up(p.nbytes, FIRST) for p in model.parameters())
    assert plan.budget_bytes <= total - 3 * held


def test_max_batch() -> None:
    """The batch found trains within the device's memory, and the search leaves the generators alone."""
    model, x = case("convolutions")
    states = torch.get_rng_state(), torch.hosted.get_rng_state()

    def sample(batch: int) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
        return (torch.randn(batch, *x.shape[1:], device=FIRST),), {}

    found = lowtide.max_batch(sample, model, budget=1 << 19)
    assert found.batch > found.batch_without > 0
    assert found.measured_peak_bytes == found.plan.peak_bytes <= 1 << 19
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(torch.hosted.get_rng_state(), states[1])


# --- online ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "device"), pairs(CASES, (FIRST, SECOND)))
def test_online(name: str, device: torch.device) -> None:
    """Equal to the bit; once every signature was seen, within the budget."""
    model, x = case(name, device)
    torch.accelerator.set_device_index(device.index)
    again, plain = copy.deepcopy(model), copy.deepcopy(model)
    peak = lowtide.measure(lambda: trained(plain, x)).peak_bytes
    expected = trained(copy.deepcopy(model), x)
    with lowtide.online(peak * 70 // 100) as session:
        actual = trained(model, x)
        assert session.statistics.evictions > 0
        settled = lowtide.online(peak * 70 // 100)  # its peak counts from here
        with settled:
            trained(again, x)
        assert settled.statistics.peak_bytes <= peak * 70 // 100
    assert equal(actual, expected)


def test_measured_where_it_ran() -> None:
    """Not on the current device, but on the one that the call used; on the CPU where it used none."""
    on_second = lowtide.measure(lambda: torch.empty(1000, dtype=torch.uint8, device=SECOND))
    assert (on_second.device, on_second.peak_bytes) == ("hosted:1", 1024)
    on_cpu = lowtide.measure(lambda: torch.empty(1000, dtype=torch.uint8))
    assert (on_cpu.device, on_cpu.peak_bytes) == ("cpu", 1000)


def test_what_is_timed_finds_a_swept_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """By memory that is gone before it is measured, and is not taken where there is none."""
    accelerator, filled = cast(Accelerator, interface_of(FIRST)), list[int]()
    monkeypatch.setattr(torch.Tensor, "zero_", lambda tensor: filled.append(tensor.nbytes))
    for cache_bytes in (0, 1 << 20, TOTAL_BYTES):
        monkeypatch.setitem(vars(accelerator), "cache_bytes", cache_bytes)
        timed = time_call(lambda: torch.empty(1 << 18, device=FIRST), FIRST, budget_ns=1)
        assert timed.peak_bytes == 1 << 20
    assert {*filled} == {4 << 20}


def test_what_is_there_at_the_end_is_measured_with_the_result() -> None:
    found = lowtide.measure(lambda: torch.ones(1 << 20, device=FIRST).neg())
    assert (found.peak_bytes, found.final_bytes) == (8 << 20, 4 << 20)


def test_online_by_default() -> None:
    assert lowtide.online("1GiB").settings.device == FIRST
    assert lowtide.online("1GiB", device="hosted:1").settings.device == SECOND
    assert lowtide.online("1GiB", device="cpu").settings.device == torch.device("cpu")


def test_online_leaves_cpu_tensors_alone() -> None:
    with lowtide.online("16KiB") as session:
        here = [torch.full((KIB,), float(index)) * 2 for index in range(16)]
        there = [torch.full((KIB,), float(index), device=FIRST) * 2 for index in range(16)]
        assert session.statistics.evictions > 0
        assert [tensor[-1].item() for tensor in there] == [2.0 * index for index in range(16)]
    assert [tensor[0].item() for tensor in here] == [2.0 * index for index in range(16)]


def test_a_device_that_is_full() -> None:
    """An allocation that the device refuses is its own error, and the model trains on afterwards."""
    model, x = case("transformer")
    expected = trained(copy.deepcopy(model), x)
    budgeted = lowtide.rematerialize(copy.deepcopy(model), (x,), budget="60%", on_capture_error="error", rescue=False)
    torch.ops.hosted.set_total(0, meter_of(FIRST).level_bytes + 64 * KIB)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        budgeted(x).backward()
    torch.ops.hosted.set_total(0, TOTAL_BYTES)
    budgeted.zero_grad()
    assert equal(trained(budgeted, x), expected)


@pytest.mark.parametrize(("name", "where"), pairs(CASES, ("forward", "backward")))
def test_a_device_with_less_than_the_budget(name: str, where: str, caplog: pytest.LogCaptureFixture) -> None:
    """The pass runs again within what it held and what was free, by the device's own generator; a further step fits at once."""
    model, x = case(name)
    expected = trained(copy.deepcopy(model), x)
    budgeted = lowtide.rematerialize(copy.deepcopy(model), (x,), budget="90%", planner=QUICK)
    (before,) = lowtide.plans(budgeted)
    if where == "forward":
        room = int(0.7 * before.peak_bytes)
        torch.ops.hosted.set_total(0, meter_of(FIRST).level_bytes + room)
    torch.hosted.manual_seed_all(2)
    loss = budgeted(x)
    if where == "backward":
        room = meter_of(FIRST).level_bytes + 2 * KIB
        loss.register_hook(lambda _: torch.ops.hosted.set_total(0, room))
    loss.backward()
    (after,) = lowtide.plans(budgeted)
    assert caplog.text.count(f"ran out of memory in its {where} pass") == 1
    assert after.peak_bytes <= after.budget_bytes < before.peak_bytes
    if where == "forward":
        assert room - 64 * KIB < after.budget_bytes <= room  # but for what the operator that failed had taken itself
    budgeted.zero_grad()
    del loss
    assert step_peak(budgeted, x) == after.peak_bytes
    torch.ops.hosted.set_total(0, TOTAL_BYTES)
    for ours, theirs in zip(budgeted.buffers(), model.buffers(), strict=True):
        ours.copy_(theirs)
    assert equal(trained(budgeted, x), expected)


# --- what runs on GPUs by ``make gpu`` -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "tiny", lambda: (convolutions(), (torch.randn(8, 3, 12, 12),), {}))
    rows = sweep_model("tiny", ["60%"], iterations=2, timings=1, device="hosted:1")
    assert [row.status for row in rows] == ["ok"]
    assert problems(rows[0]) == []


@pytest.mark.slow
def test_comparison(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = Compared(lambda batch: (perceptron(), (torch.randn(batch, 64),), {}), 64, lambda model: [])
    monkeypatch.setitem(COMPARED, "tiny", tiny)
    assert worker.main(["--device", "hosted", "--rounds", "1", "tiny", "lowtide", "70%"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["message"], row["gradient_error"]) == ("", 0.0)
    assert row["peak_bytes"] == row["predicted_peak_bytes"] <= row["budget_bytes"] < row["plain_peak_bytes"]
    assert row["reserved_bytes"] == row["peak_bytes"]  # nothing is cached here


@pytest.mark.slow
def test_demo(tmp_path: Path) -> None:
    options = ["--device", "hosted", "--layers", "1", "--batch", "1", "--steps", "3", "--budget", "70%"]
    assert command_line(["demo", *options, "--output", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "result.json").read_text())["device"] == "hosted"


@pytest.mark.slow
def test_gpu_in_one_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--dry-run", "--results", str(tmp_path)]) == 0
    assert f"-m benchmarks.compare --device hosted:0 --results {tmp_path / 'hosted'}" in capsys.readouterr().out
    assert gpu.main(["--steps", "sweeep"]) == 2
    done = [gpu.Done("tests", "-m pytest", 0, 2.0), gpu.Done("demo", "-m lowtide demo", 1, 3.4)]
    text = gpu.document(accelerators()[0], done)
    assert "8.0 GiB, one device of 2" in text
    assert "| demo | `python -m lowtide demo` | failed, exit code 1: demo.log | 3 |" in text
