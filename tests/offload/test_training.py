"""Training with tensors that move to a file and back: equal to the bit, within the budget to the byte, whatever goes wrong."""

from __future__ import annotations

import copy
import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.api import runtime_of
from lowtide.ir import Fetch, timing
from lowtide.offload import open_memory
from lowtide.offload.bandwidth import Bandwidth
from lowtide.offload.disk import DiskMemory
from lowtide.planning.make import make_plan
from lowtide.runtime.programs.entry import Siblings, lowered
from tests.support.networks import WithLoss, residual_blocks, rows
from tests.support.training import compare_training, make

CPU = torch.device("cpu")


class Normed(nn.Module):
    """Batch statistics, dropout, results of two storages, views and in-place activations."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.up(self.norm(x)).chunk(2, dim=-1)
        result: torch.Tensor = self.drop(self.down(torch.relu_(gate * 2.0) * torch.tanh(value)))
        return result


def _network() -> nn.Module:
    return WithLoss(residual_blocks(Normed, 3))


@pytest.fixture
def disk(tmp_path: Path) -> str:
    return f"disk:{tmp_path}"


@pytest.fixture
def quick(disk: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A disk that is believed to be so quick that ``auto`` moves what it can of a small network."""
    monkeypatch.setattr("lowtide.offload.bandwidth._measured", lambda name, device: Bandwidth(10**11, 10**11, 1000))
    return disk


@pytest.mark.parametrize("planner", ["offload{effort=0}", "auto{effort=0}"])
@pytest.mark.parametrize("budget", ["60%", "35%"])
def test_equal_to_the_bit_and_within_the_budget(planner: str, budget: str, disk: str) -> None:
    (outcome,) = compare_training(_network, rows(512), budgets=(budget,), planner=planner, offload=disk)
    (plan,) = lowtide.plans(outcome.model)
    if planner.startswith("offload"):
        assert plan.schedule.moves
        assert "to the second memory" in str(plan)


def _steps(model: nn.Module, count: int = 3, **more: Any) -> list[torch.Tensor]:
    """Losses and gradients."""
    found = []
    for number in range(count):
        model.zero_grad(set_to_none=True)
        torch.manual_seed(number)
        args, kwargs = rows(512)(number)
        loss = model(*args, **kwargs)
        loss.backward(**more)
        if more:
            loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    return found


def _moving(disk: str, **options: Any) -> tuple[nn.Module, nn.Module]:
    """A model that moves tensors, and the same in eager mode."""
    model = make(_network)
    eager = copy.deepcopy(model)
    args, kwargs = rows(512)(0)
    options = {"planner": "offload{effort=0}", "budget": "35%", **options}
    lowtide.rematerialize(model, args, kwargs, offload=disk, **options)
    assert any(isinstance(step, Fetch) for step in lowtide.plans(model)[0].schedule.steps)
    return model, eager


def _same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def test_what_keeps_all_is_offered_a_schedule_that_moves(disk: str) -> None:
    """Of equal parts of a model, one may have room for all of its tensors: its plan knows of no second memory."""
    model, _ = _moving(disk)
    ((entry,),) = runtime_of(model).entries.values()  # type: ignore[union-attr]
    siblings, costs = Siblings(), dataclasses.replace(entry.plan.costs, second_memory=None)
    siblings.keep(entry)
    plan = make_plan(entry.program.graph, costs, budget="100%", planner="keep-all")
    other = dataclasses.replace(entry, plan=plan, lowered=lowered(entry.program, plan, None))
    siblings.take_over(other, waits=True)
    assert other.plan is plan


def test_a_graph_that_is_kept_runs_again(disk: str) -> None:
    model, eager = _moving(disk)
    assert _same(_steps(model, retain_graph=True), _steps(eager, retain_graph=True))


def test_calls_whose_backward_passes_come_later_have_their_own_room(disk: str) -> None:
    model, eager = _moving(disk)

    def together(one: nn.Module) -> list[torch.Tensor]:
        one.zero_grad(set_to_none=True)
        losses = []
        for number in range(3):
            torch.manual_seed(number)
            args, kwargs = rows(512)(number)
            losses.append(one(*args, **kwargs))
        for loss in (losses[1], losses[2], losses[0]):
            loss.backward()
        return [*(loss.detach() for loss in losses), *(p.grad.clone() for p in one.parameters() if p.grad is not None)]

    assert _same(together(model), together(eager))


def test_room_is_used_again(disk: str) -> None:
    model, _ = _moving(disk)
    memory = open_memory(disk, CPU)
    assert isinstance(memory, DiskMemory)
    _steps(model, 1)
    size = os.fstat(memory._file).st_size
    args, kwargs = rows(512)(0)
    for _ in range(3):
        model(*args, **kwargs)  # no backward pass
    _steps(model, 3)
    assert os.fstat(memory._file).st_size == size


def test_plans_that_improve_while_training_runs(quick: str) -> None:
    model, eager = _moving(quick, planner="auto", planning="background")
    first = _steps(model, 2)
    lowtide.wait(model)
    assert _same([*first, *_steps(model, 3)], [*_steps(eager, 2), *_steps(eager, 3)])


def test_other_shapes(quick: str) -> None:
    model, eager = _moving(quick, dynamic=True, planner="auto")
    for batch in (512, 300, 411, 77):
        results = []
        for one in (model, eager):
            torch.manual_seed(batch)
            args, kwargs = rows(batch)(0)
            one.zero_grad(set_to_none=True)
            loss = one(*args, **kwargs)
            loss.backward()
            results.append([loss.detach(), *(p.grad for p in one.parameters() if p.grad is not None)])
        assert _same(*results)


def test_parts_move_too(disk: str) -> None:
    """A model that is no single program."""

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = residual_blocks(Normed, 3), residual_blocks(Normed, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            scale = bool(x.detach().abs().mean() > 0.1)
            result: torch.Tensor = self.second(x * 2 if scale else x).square().mean()
            return result

    model = make(Routed)
    eager = copy.deepcopy(model)
    args, kwargs = rows(512)(0)
    lowtide.rematerialize(model, args, kwargs, budget="50%", planner="offload{effort=0}", offload=disk)
    assert _same(_steps(model), _steps(eager))


def test_a_read_that_fails_is_an_error_and_the_next_step_is_right(disk: str, tmp_path: Path) -> None:
    model, eager = _moving(disk)
    memory = open_memory(disk, CPU)
    assert isinstance(memory, DiskMemory)
    _steps(model, 1)
    args, kwargs = rows(512)(0)
    loss = model(*args, **kwargs)
    model.zero_grad(set_to_none=True)
    size = os.fstat(memory._file).st_size
    done = memory.begin(lambda buffer: os.ftruncate(memory._file, 0))
    done.done.wait()
    with pytest.raises(lowtide.ExecutionError, match="could not be read back"):
        loss.backward()
    del loss
    os.ftruncate(memory._file, size)
    assert _same(_steps(model), _steps(eager))


def test_what_comes_back_otherwise_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWTIDE_OFFLOAD_CHECKSUMS", "1")
    model, eager = _moving(f"disk:{tmp_path}")
    assert _same(_steps(model), _steps(eager))
    memory = open_memory(f"disk:{tmp_path}", CPU)
    assert isinstance(memory, DiskMemory)
    assert memory.checksums
    args, kwargs = rows(512)(0)
    loss = model(*args, **kwargs)
    size = os.fstat(memory._file).st_size
    zeros = bytes(4096)

    def damage(buffer: Any) -> None:
        for offset in range(0, size, 4096):
            buffer[:4096] = 0
            os.pwrite(memory._file, buffer[: len(zeros)], offset)

    memory.begin(damage).done.wait()
    with pytest.raises(lowtide.ExecutionError, match="came back otherwise"):
        loss.backward()


def test_no_room(tmp_path: Path) -> None:
    memory = DiskMemory(str(tmp_path))
    with pytest.raises(
        lowtide.ExecutionError, match=r"moves 1125899906842624 bytes .* to a file in .* Name another folder"
    ):
        memory.lease(1 << 50)
    assert memory.lease(1 << 20)
    with pytest.raises(lowtide.ExecutionError, match="no file can be made in"):
        DiskMemory(str(tmp_path / "nowhere"))
    with pytest.raises(lowtide.PlanError, match="offload_budget of 1125899906842624 bytes"):
        _moving(f"disk:{tmp_path}", offload_budget=1 << 50)


def test_the_second_memory_holds_no_more_than_its_budget(quick: str) -> None:
    whole, eager = _moving(quick, budget="40%")
    moved = lowtide.plans(whole)[0]
    model, options = copy.deepcopy(eager), {"planner": "auto{effort=0}", "budget": "40%", "offload_budget": "300KiB"}
    lowtide.rematerialize(model, *rows(512)(0), offload=quick, **options)  # type: ignore[arg-type]
    (plan,) = lowtide.plans(model)
    assert plan.costs.second_memory is not None
    assert plan.costs.second_memory.capacity_bytes == 300 << 10
    assert timing(plan.graph, plan.costs, plan.schedule).second_peak_bytes <= 300 << 10
    assert timing(moved.graph, moved.costs, moved.schedule).second_peak_bytes > 300 << 10
    assert _same(_steps(model), _steps(eager))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offload": "tape"}, "offload='tape' is unknown; use \"cpu\""),
        ({"offload": "disk:"}, "is unknown"),
        ({"offload": "cpu"}, 'use "disk"'),
        ({"offload": "disk", "arena": True}, "give one of them"),
        ({"offload_budget": "1GiB"}, "offload_budget= needs offload="),
        ({"offload": "disk", "offload_budget": "much"}, "is not an offload_budget"),
    ],
)
def test_what_makes_no_sense(options: dict[str, Any], message: str) -> None:
    args, kwargs = rows(64)(0)
    with pytest.raises(lowtide.PlanError, match=message):
        lowtide.rematerialize(make(_network), args, kwargs, budget="50%", **options)


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_a_model_on_meta_has_no_second_memory(where: str) -> None:
    model = nn.Linear(8, 8, device="meta")
    with pytest.raises(lowtide.PlanError, match=r"on meta .* lowtide\.fits\("):
        lowtide.plan(model, (torch.empty(4, 8, device="meta"),), budget="50%", offload=where)


def test_plans_with_transfers_are_saved_and_reported(disk: str, tmp_path: Path) -> None:
    model, _ = _moving(disk)
    (plan,) = lowtide.plans(model)
    plan.save(tmp_path / "plan.json")
    again = lowtide.Plan.load(tmp_path / "plan.json")
    assert (again.schedule, again.time_ns, again.costs.second_memory) == (
        plan.schedule, plan.time_ns, plan.costs.second_memory,
    )  # fmt: skip
    report = again.as_report()
    assert (report.run.peak_bytes, report.run.time_ns) == (plan.peak_bytes, plan.time_ns)
    for name in ("plan.html", "plan.trace.json", "plan.map.svg", "plan.txt"):
        again.report(tmp_path / name)
        assert (tmp_path / name).stat().st_size


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_nothing_is_left_of_a_process_that_is_killed(how: int, tmp_path: Path) -> None:
    program = f"""
        import sys, torch
        from lowtide.offload.disk import DiskMemory
        memory = DiskMemory({str(tmp_path)!r})
        lease = memory.lease(256 << 20)
        tensor = torch.ones(64 << 20)
        copies = [lease.offload(0, (tensor,)) for _ in range(20)]
        print("moving", flush=True)
        copies[-1].left()
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True, env={**os.environ}
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "moving\n"
    process.send_signal(how)
    assert process.wait(60) == -how
    process.stdout.close()
    assert list(tmp_path.iterdir()) == []


def test_bytes_come_back_as_they_went(tmp_path: Path) -> None:
    """Of all types and layouts, several views of a storage at once; the memory of what has left is free."""
    memory = DiskMemory(str(tmp_path))
    lease = memory.lease(64 << 20)
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
        base = torch.randint(0, 2, (3, 1000, 1001)).to(dtype)
        values = (base.transpose(0, 2), base[1:, 5:], base)
        copies = lease.offload(4096, values)
        copies.left()
        fetched = copies.fetch()
        copies.back()
        assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(fetched, values, strict=True))
        assert len({value.untyped_storage().data_ptr() for value in fetched}) == 1
    storage_free = lowtide.measure(lambda: _leave(lease)).final_bytes
    assert storage_free == 0


def _leave(lease: Any) -> None:
    tensor = torch.ones(1 << 20)
    copies = lease.offload(0, (tensor,))
    copies.left()
