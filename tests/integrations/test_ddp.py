"""``DistributedDataParallel`` over rematerialized models, two processes on the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lowtide
from tests.integrations.launch import torchrun

_PROGRAM = "tests.integrations.ddp_program"


@pytest.mark.slow
def test_twenty_steps() -> None:
    """Equal to plain DDP to the bit, one plan for both ranks, within the budget, reductions before the last gradient."""
    output = torchrun(_PROGRAM, "twenty_steps", "buckets_are_reduced_while_the_backward_runs")
    assert output.count("passed") == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "scenario",
    [
        "accumulation_without_synchronisation",
        "other_shapes_on_every_rank",
        "options_of_ddp",
        "infeasible_on_every_rank",
        "plans_get_better_at_the_same_step",
    ],
)
def test_scenario(scenario: str) -> None:
    assert torchrun(_PROGRAM, scenario).count("passed") == 2


def test_the_other_way_round_is_refused() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(nn.Linear(4, 4))
        with pytest.raises(lowtide.PlanError, match="DistributedDataParallel"):
            lowtide.rematerialize(model, (torch.ones(2, 4),), budget="50%")
    finally:
        dist.destroy_process_group()
