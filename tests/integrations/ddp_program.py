"""What ``test_ddp`` runs under torchrun: ``python -m tests.integrations.ddp_program SCENARIO...``."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import lowtide
from lowtide.demo.gpt2 import Shape, build_model, draw_batches, load_corpus
from tests.integrations.launch import say
from tests.integrations.scenarios import perform

SHAPE = Shape(layers=3, width=64, heads=2, context=64, batch=4)
BUCKET_MIB = 0.1
_WARM = 3  # DDP builds its buckets anew in the first steps


@dataclass(slots=True)
class Run:
    """What a training left: ``gradients[step][parameter]``, measured peaks of the passes after the first ones."""

    model: DistributedDataParallel
    losses: list[float] = field(default_factory=list)
    gradients: list[list[torch.Tensor]] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)


def make(
    *, planned: bool, budget: str = "40%", planner: str = "auto{effort=1}", **options: Any
) -> DistributedDataParallel:
    """GPT-2 with dropout, in small buckets; random numbers differ from rank to rank."""
    torch.manual_seed(dist.get_rank())
    model = build_model(SHAPE)
    if planned:
        lowtide.rematerialize(model, budget=budget, planner=planner)
    return DistributedDataParallel(model, bucket_cap_mb=BUCKET_MIB, **options)


def batches(steps: int, lengths: Sequence[int] = (SHAPE.context,)) -> list[torch.Tensor]:
    """Other text on every rank; ``lengths`` in turn, shifted from rank to rank."""
    rank = dist.get_rank()
    drawn = draw_batches(load_corpus(200_000), SHAPE, steps, seed=rank)
    return [batch[:, : lengths[(index + rank) % len(lengths)]] for index, batch in enumerate(drawn)]


def train(model: DistributedDataParallel, data: list[torch.Tensor], accumulate: int = 1) -> Run:
    run = Run(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for index, batch in enumerate(data):
        last = index % accumulate == accumulate - 1

        def compute(batch: torch.Tensor = batch, last: bool = last) -> None:
            with contextlib.nullcontext() if last else model.no_sync():
                loss = model(input_ids=batch, labels=batch).loss
                loss.backward()
            run.losses.append(loss.item())

        measured = lowtide.measure(compute)
        if index >= _WARM:
            run.peaks.append(measured.peak_bytes)
        if last:
            run.gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
            optimizer.step()
            optimizer.zero_grad()
    return run


def assert_same(ours: Run, reference: Run) -> None:
    assert ours.losses == reference.losses
    for step, (mine, theirs) in enumerate(zip(ours.gradients, reference.gradients, strict=True)):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)), f"gradients differ in step {step}"
    mine, theirs = ours.model.state_dict(), reference.model.state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def everywhere(thing: Any) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, thing)
    return gathered


def description(plan: lowtide.Plan) -> tuple[Any, ...]:
    """What would differ, had two ranks measured and planned for themselves."""
    return (plan.budget_bytes, str(plan.schedule), tuple(plan.costs.time_ns.tolist()), plan.solve_seconds)


def twenty_steps() -> None:
    """Bits, one plan for all ranks, and every rank's measured peak within the budget."""
    ours, reference = (train(make(planned=planned), batches(20)) for planned in (True, False))
    assert_same(ours, reference)
    (plan,) = lowtide.plans(ours.model.module)
    assert len(set(everywhere(description(plan)))) == 1
    assert max(ours.peaks) <= plan.budget_bytes, (max(ours.peaks), plan.budget_bytes)
    assert max(ours.peaks) < 0.45 * max(reference.peaks)
    say(f"peak {max(ours.peaks)} of budget {plan.budget_bytes}, without lowtide {max(reference.peaks)}")


def plans_get_better_at_the_same_step() -> None:
    """One rank searches, all exchange each plan before the same step, and results stay plain DDP's to the bit."""
    model, plans = make(planned=True, planner="auto"), list[tuple[Any, ...]]()
    searching = None

    def watched(data: list[torch.Tensor]) -> Run:
        nonlocal searching
        run = Run(model)
        for index, batch in enumerate(data):
            if index == 8:
                assert lowtide.wait(model.module, 120)
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            run.losses.append(loss.item())
            run.gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
            model.zero_grad()
            plans.append(description(lowtide.plans(model.module)[0])[:3])
            runtime = model.module.forward
            searching = searching or runtime.improving._search is not None
        return run

    ours = watched(batches(24))
    reference = make(planned=False)
    for step, batch in enumerate(batches(24)):
        loss = reference(input_ids=batch, labels=batch).loss
        loss.backward()
        assert loss.item() == ours.losses[step]
        grads = [p.grad for p in reference.parameters() if p.grad is not None]
        assert all(torch.equal(a, b) for a, b in zip(grads, ours.gradients[step], strict=True)), step
        reference.zero_grad()
    assert len(set(map(str, everywhere(plans)))) == 1, "ranks ran by other plans"
    assert sorted(everywhere(bool(searching))) == [False, True], "not one rank searched"
    assert len({plan[1] for plan in plans}) > 1, "no plan was exchanged"
    lowtide.restore(model.module)


def buckets_are_reduced_while_the_backward_runs() -> None:
    events: list[str] = []

    def noted(bucket: dist.GradBucket) -> dist.GradBucket:
        events.append("reduction")
        return bucket

    model = make(planned=True)
    model.register_comm_hook(None, lambda group, bucket: default_hooks.allreduce_hook(group, noted(bucket)))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: events.append("gradient"))
    for batch in batches(3):
        events.clear()
        model(input_ids=batch, labels=batch).loss.backward()
    last = len(events) - 1 - events[::-1].index("gradient")
    total, early = events.count("reduction"), events[:last].count("reduction")
    assert total >= 4
    assert early >= total // 2, events
    say(f"{early} of {total} buckets reduced before the last of {events.count('gradient')} gradients")


def accumulation_without_synchronisation() -> None:
    ours, reference = (train(make(planned=planned), batches(6), accumulate=3) for planned in (True, False))
    assert_same(ours, reference)


def other_shapes_on_every_rank() -> None:
    """In no step do the ranks see the same length; the same length still has the same plan on both."""
    lengths = (64, 48, 32)
    ours, reference = (train(make(planned=planned), batches(6, lengths)) for planned in (True, False))
    assert_same(ours, reference)
    found = {plan.unconstrained_peak_bytes: description(plan)[1:3] for plan in lowtide.plans(ours.model.module)}
    assert len(found) == len(lengths)
    first, second = everywhere(found)
    assert first.keys() == second.keys()
    assert sum(first[key] == second[key] for key in first) >= 1


def options_of_ddp() -> None:
    for options in ({"static_graph": True}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}):
        ours, reference = (train(make(planned=planned, **options), batches(4)) for planned in (True, False))
        assert_same(ours, reference)


def infeasible_on_every_rank() -> None:
    model = make(planned=True, budget="2%")
    try:
        train(model, batches(1))
    except lowtide.InfeasibleBudgetError as error:
        assert error.minimum_bytes > 0
        return
    raise AssertionError("a budget of 2 % was met")


if __name__ == "__main__":
    perform(
        twenty_steps,
        buckets_are_reduced_while_the_backward_runs,
        accumulation_without_synchronisation,
        other_shapes_on_every_rank,
        options_of_ddp,
        infeasible_on_every_rank,
        plans_get_better_at_the_same_step,
    )
