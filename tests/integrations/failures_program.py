"""What ``test_failures`` runs: ranks that die, stall, or have too little memory: ``... failures_program SCENARIO``."""

from __future__ import annotations

import datetime
import os
import time
from typing import Any

import torch
import torch.distributed as dist

import lowtide
from lowtide.cost import collectives, measured
from tests.integrations.fsdp_program import Run, batches, make, of_all_ranks, plan_of
from tests.integrations.scenarios import perform


def _is_last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def _between_its_passes(run: Run) -> Any:
    run.train(batches(1))
    batch = batches(1)[0]
    return run.model(input_ids=batch, labels=batch).loss


def restarted() -> None:
    """The first time the last rank dies in its second step; the second time plans and costs are those on disk."""
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    counts = {"operators": 0, "collectives": 0}
    measure_operators, measure_collective = measured._measure, collectives._measured

    def operators(program: Any, missing: Any, *rest: Any) -> Any:
        counts["operators"] += len(missing)
        return measure_operators(program, missing, *rest)

    def collective(*given: Any) -> Any:
        counts["collectives"] += 1
        return measure_collective(*given)

    measured._measure, collectives._measured = operators, collective  # type: ignore[assignment]
    run = make("50%")
    loss = _between_its_passes(run)
    cached = bool(of_all_ranks([plan_of(run).cached]))  # of the one that others take it from
    if not first:
        assert counts == {"operators": 0, "collectives": 0}, counts
        assert cached
        loss.backward()
        return
    assert counts["collectives"] > 0
    assert not cached
    if _is_last():
        os._exit(3)
    loss.backward()
    raise AssertionError("a gather with a rank that is dead ended")


def stalled() -> None:
    """The last rank comes to its backward pass never: the others wait as long as the group says."""
    loss = _between_its_passes(make("50%"))
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=5), dist.group.WORLD)
    if _is_last():
        time.sleep(3600)
    loss.backward()


def too_little_for_one() -> None:
    """A budget that the last rank, whose batches are longer, cannot keep to: no rank begins, and all say why."""
    run = make()
    batch = batches(1)[0] if _is_last() else batches(1)[0][:, :16]
    sample = {"input_ids": batch, "labels": batch}
    try:
        lowtide.rematerialize(run.model, (), sample, budget=1_500_000, planner="auto{effort=1}")
    except lowtide.InfeasibleBudgetError as error:
        assert _is_last(), error
        assert error.minimum_bytes > 1_500_000
    except lowtide.PlanError as error:
        assert not _is_last()
        assert f"rank {dist.get_world_size() - 1} has no plan" in str(error)
        assert "1500000 bytes" in str(error)
    else:
        raise AssertionError("a rank began")
    run.train(batches(1))  # as if nothing had been asked
    lowtide.rematerialize(run.model, (), sample, budget="60%", planner="auto{effort=1}")
    run.train(batches(1))


def in_another_order() -> None:
    """Two collectives that gloo takes for each other."""
    for shape in reversed([(4,), (2, 2)]) if _is_last() else [(4,), (2, 2)]:
        dist.all_reduce(torch.ones(shape))


if __name__ == "__main__":
    perform(restarted, stalled, too_little_for_one, in_another_order)
