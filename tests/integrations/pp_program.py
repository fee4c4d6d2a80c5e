"""What ``test_pipeline_parallel`` runs under torchrun: ``python -m tests.integrations.pp_program SCENARIO...``."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    SplitPoint,
    pipeline,
)

import lowtide
from tests.integrations.collectives import Moved, sent_and_received
from tests.integrations.launch import say
from tests.integrations.scenarios import local, perform
from tests.integrations.tp_program import LENGTH, WIDTH, Block

MICRO_BATCHES, ROWS, _STEPS = 4, 2, 4
ACTIVATION_BYTES = ROWS * LENGTH * WIDTH * 4  # of a micro-batch, between two stages
LOSS_BYTES = 3 * ACTIVATION_BYTES + 64  # for a micro-batch: a difference, and two gradients of it
Build = Callable[[list[PipelineStage]], Any]


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, target)


def gpipe(stages: list[PipelineStage]) -> Any:
    return ScheduleGPipe(stages[0], MICRO_BATCHES, loss_fn=loss_of)


def one_forward_one_backward(stages: list[PipelineStage]) -> Any:
    return Schedule1F1B(stages[0], MICRO_BATCHES, loss_fn=loss_of)


def interleaved(stages: list[PipelineStage]) -> Any:
    return ScheduleInterleaved1F1B(stages, MICRO_BATCHES, loss_fn=loss_of)


def zero_bubble(stages: list[PipelineStage]) -> Any:
    return ScheduleInterleavedZeroBubble(stages, MICRO_BATCHES, loss_fn=loss_of)


@dataclass(slots=True)
class Run:
    """A training of this rank's stages. ``moved``: what they sent and received, in order."""

    modules: list[nn.Module]
    moved: list[Moved] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)
    gradients: list[list[torch.Tensor]] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)

    def train(self, build: Build, stages: list[PipelineStage], seed: int = 3) -> Run:
        schedule = build(stages)
        parameters = [parameter for module in self.modules for parameter in module.parameters()]
        optimizer = torch.optim.AdamW(parameters, lr=1e-3, foreach=False)
        torch.manual_seed(seed)
        with sent_and_received() as self.moved:
            for _ in range(_STEPS):
                given, target = torch.randn(2, MICRO_BATCHES * ROWS, LENGTH, WIDTH)
                losses: list[torch.Tensor] = []
                arguments = (given,) if stages[0].is_first else ()
                options = {"target": target, "losses": losses} if stages[-1].is_last else {}

                def compute(arguments: Any = arguments, options: Any = options) -> None:
                    schedule.step(*arguments, **options)

                self.peaks.append(lowtide.measure(compute).peak_bytes)
                self.losses.append([loss.item() for loss in losses])
                self.gradients.append([local(p.grad).clone() for p in parameters if p.grad is not None])
                optimizer.step()
                optimizer.zero_grad()
        return self


def trained(build: Build, budgets: Sequence[int | str] = (), in_flight: Sequence[int] = (1,)) -> Run:
    """This rank's stages, as many as there are numbers ``in_flight``, planned for ``budgets`` where there are some."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    modules = [nn.Sequential(Block(0.1), Block(0.1)) for _ in in_flight]
    stages = []
    for number, module in enumerate(modules):
        index = rank + ranks * number
        last = index == ranks * len(modules) - 1
        if budgets:
            sample = torch.ones(ROWS, LENGTH, WIDTH, requires_grad=index > 0)
            kept = reserved(in_flight[number], first=index == 0, last=last)
            kept += gradient_bytes(module) if in_flight[number] == 1 else 0
            options = {"in_flight": in_flight[number], "reserve": kept, "planner": "auto{effort=1}"}
            budget = budgets[number]
            lowtide.rematerialize(module, (sample,), budget=budget, on_capture_error="error", **options)  # type: ignore[arg-type]
        stages.append(PipelineStage(module, index, ranks * len(modules), torch.device("cpu")))
    return Run(modules).train(build, stages)


def reserved(in_flight: int, *, first: bool, last: bool) -> int:
    """What a stage's schedule keeps beside its passes: gradients of what it received, and of the last stage the outputs, and
    what the losses need."""
    received = 0 if first else MICRO_BATCHES * ACTIVATION_BYTES
    return received + (MICRO_BATCHES * ACTIVATION_BYTES + in_flight * LOSS_BYTES if last else 0)


def gradient_bytes(module: nn.Module) -> int:
    """Of those that earlier micro-batches left: outside of a budget for one call."""
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


def assert_same(ours: Run, reference: Run) -> None:
    assert ours.losses == reference.losses, (ours.losses, reference.losses)
    assert ours.moved == reference.moved
    assert len(ours.moved) >= 2 * MICRO_BATCHES * _STEPS
    for mine, theirs in zip(ours.gradients, reference.gradients, strict=True):
        assert len(mine) == len(theirs)
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def _one_stage(build: Build, in_flight: int) -> None:
    reference = trained(build)
    alone = max(reference.peaks[1:])  # buffers of what is received come with the first step
    budget = int(0.85 * alone)
    ours = trained(build, (budget,), (in_flight,))
    assert_same(ours, reference)
    (plan,) = lowtide.plans(ours.modules[0])
    assert plan.in_flight == in_flight
    assert plan.overhead > 0
    assert max(ours.peaks[1:]) <= budget, (ours.peaks, budget)
    say(
        f"{in_flight} in flight: peaks {ours.peaks}, planned {plan.peak_bytes + plan.waiting_bytes}, of {budget}, alone {alone}"
    )


def all_micro_batches() -> None:
    """GPipe: bits, and the measured peak of a step within the budget."""
    _one_stage(gpipe, MICRO_BATCHES)


def as_many_as_stages_follow() -> None:
    """1F1B: so many in flight as there are stages from this one on."""
    _one_stage(one_forward_one_backward, dist.get_world_size() - dist.get_rank())


def split_by_pytorch() -> None:
    """A whole model, exported and split into uneven stages: three blocks and one."""

    def stages(share: str | None) -> Run:
        torch.manual_seed(0)
        model, rank = nn.Sequential(*(Block(0.1) for _ in range(4))), dist.get_rank()
        sample = (torch.ones(ROWS, LENGTH, WIDTH),)
        split = pipeline(model, mb_args=sample, split_spec={"3": SplitPoint.BEGINNING})
        module: Any = split.get_stage_module(rank)
        if share:
            options: dict[str, Any] = {"planner": "auto{effort=1}", "on_capture_error": "error"}
            lowtide.rematerialize(module, budget=share, in_flight=dist.get_world_size() - rank, **options)
        return Run([module]).train(one_forward_one_backward, [split.build_stage(rank, torch.device("cpu"))])

    reference, ours = stages(None), stages("75%")
    assert_same(ours, reference)
    (plan,) = lowtide.plans(ours.modules[0])
    assert plan.overhead > 0
    say(f"peaks {ours.peaks}, planned {plan.peak_bytes + plan.waiting_bytes}, alone {reference.peaks}")


def counted(schedule: Any, rank: int) -> dict[int, int]:
    """By stage, the most micro-batches of it that are in flight on a rank."""
    running, most = Counter[int](), Counter[int]()
    for action in filter(None, schedule.pipeline_order[rank]):
        running[action.stage_index] += (action.computation_type == "F") - (action.computation_type == "B")
        most[action.stage_index] = max(most[action.stage_index], running[action.stage_index])
    return dict(most)


def counted_by_number(schedule: Any, rank: int) -> dict[int, int]:
    """The same by the number of a stage on its rank."""
    return {stage // dist.get_world_size(): count for stage, count in counted(schedule, rank).items()}


def several_stages_of_a_rank() -> None:
    """Interleaved 1F1B: each stage has a budget of its own, and the rank's peak is within both together."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    plain = [PipelineStage(nn.Identity(), rank + ranks * number, 2 * ranks, torch.device("cpu")) for number in range(2)]
    most = counted(interleaved(plain), rank)
    in_flight = [most[stage.stage_index] for stage in plain]
    assert all(1 <= count <= MICRO_BATCHES for count in in_flight)
    reference = trained(interleaved, (), in_flight)
    alone = max(reference.peaks[1:])
    ours = trained(interleaved, (int(0.45 * alone),) * 2, in_flight)
    assert_same(ours, reference)
    plans = [lowtide.plans(module)[0] for module in ours.modules]
    assert [plan.in_flight for plan in plans] == in_flight
    assert any(plan.overhead > 0 for plan in plans)
    assert max(ours.peaks[1:]) <= 0.9 * alone, (ours.peaks, alone)
    say(f"in flight {in_flight}: peaks {ours.peaks}, alone {alone}")


def stages_that_share_a_budget() -> None:
    """Interleaved 1F1B: one budget for all stages of a rank. Bits, the measured peak, and less time than by budgets of each."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    reference = trained(interleaved, (), (1, 1))
    alone = max(reference.peaks[1:])
    for share in (0.85, 0.6):
        budget, shared = int(share * alone), []

        def planned(stages: list[PipelineStage], budget: int = budget, shared: list[Any] = shared) -> Any:
            schedule = interleaved(stages)
            kept = sum(
                reserved(count, first=rank + ranks * number == 0, last=rank + ranks * number == 2 * ranks - 1)
                for number, count in counted_by_number(schedule, rank).items()
            )
            samples = [(torch.ones(ROWS, LENGTH, WIDTH),)] * 2
            lowtide.rematerialize_stages(schedule, *samples, budget=budget, reserve=kept, planner="auto{effort=1}")
            shared += [lowtide.plans(stage.submod)[0] for stage in stages]
            return schedule

        ours = trained(planned, (), (1, 1))
        assert_same(ours, reference)
        assert any(plan.overhead > 0 for plan in shared)
        totals = {plan.budget_bytes + plan.waiting_bytes for plan in shared}
        say(f"peaks {ours.peaks} of {budget}, alone {alone}, overheads {[plan.overhead for plan in shared]}, {totals}")
        assert max(ours.peaks[1:]) <= budget, (ours.peaks, budget)


def split_backward_passes_are_refused() -> None:
    try:
        trained(zero_bubble, ("100%",) * 2, (MICRO_BATCHES,) * 2)
    except (RuntimeError, lowtide.ExecutionError) as error:
        chain: BaseException | None = error
        while chain is not None and not isinstance(chain, lowtide.ExecutionError):
            chain = chain.__cause__ or chain.__context__
        assert chain is not None, error
        assert "ZeroBubble" in str(chain)
        say(f"rank {dist.get_rank()}: refused, passed")
        os._exit(0)  # what the ranks have sent each other is still under way, in a barrier's place too
    raise AssertionError("a schedule that splits backward passes ran")


def _sharded_stage(budget: int | None, build: Build, in_flight: Sequence[int]) -> Run:
    """A stage of two, whose blocks are sharded over the two ranks that have it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "shard"))
    stage, ranks = mesh["pipeline"].get_local_rank(), mesh["pipeline"].get_group()
    torch.manual_seed(stage)
    module = nn.Sequential(Block(0.1), Block(0.1))
    whole_bytes = gradient_bytes(module)  # of gradients that are not reduced until the last micro-batch
    for block in module:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(module, mesh=mesh["shard"])
    if budget is not None:
        sample = torch.ones(ROWS, LENGTH, WIDTH, requires_grad=stage > 0)
        kept = reserved(in_flight[stage], first=stage == 0, last=stage == 1)
        kept += whole_bytes if in_flight[stage] == 1 else 0
        options: dict[str, Any] = {"in_flight": in_flight[stage], "reserve": kept, "planner": "auto{effort=1}"}
        lowtide.rematerialize(module, (sample,), budget=budget, **options)
    stages = [PipelineStage(module, stage, 2, torch.device("cpu"), group=ranks)]
    return Run([module]).train(build, stages, seed=3 + mesh["shard"].get_local_rank())


def sharded_stages() -> None:
    """FSDP2 inside of stages: gradients of all micro-batches are whole until they are reduced, once, after the last."""
    for build, in_flight in ((one_forward_one_backward, (2, 1)), (gpipe, (MICRO_BATCHES, MICRO_BATCHES))):
        reference = _sharded_stage(None, build, in_flight)
        alone = torch.tensor(max(reference.peaks[1:]))
        dist.all_reduce(alone, op=dist.ReduceOp.MAX)
        budget = int(0.85 * alone)
        ours = _sharded_stage(budget, build, in_flight)
        assert_same(ours, reference)
        (plan,) = lowtide.plans(ours.modules[0])
        together = plan.peak_bytes + plan.waiting_bytes
        say(f"{plan.in_flight} in flight: peaks {ours.peaks}, planned {together} of {budget}, alone {reference.peaks}")
        assert max(ours.peaks[1:]) <= budget, (ours.peaks, budget)


if __name__ == "__main__":
    perform(
        all_micro_batches,
        as_many_as_stages_follow,
        split_by_pytorch,
        several_stages_of_a_rank,
        stages_that_share_a_budget,
        split_backward_passes_are_refused,
        sharded_stages,
    )
