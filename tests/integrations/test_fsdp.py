"""FSDP2 over blocks with plans of their own, two processes on the CPU."""

from __future__ import annotations

import pytest
import torch

import lowtide
from lowtide.integrations.fsdp import rematerialize_blocks
from lowtide.integrations.samples import BlockCalls
from tests.integrations.launch import torchrun
from tests.integrations.trainers import gpt2, text

_PROGRAM = "tests.integrations.fsdp_program"


@pytest.mark.slow
@pytest.mark.parametrize(
    "scenario",
    [
        "losses_and_peaks",
        "gathers_are_as_without_plans",
        "saved_and_resumed",
        "other_shapes_and_precision",
        "mistakes_are_named",
    ],
)
def test_scenario(scenario: str) -> None:
    assert torchrun(_PROGRAM, scenario).count("passed") == 2


def test_blocks_without_sharding() -> None:
    """In one process, unsharded: the prediction holds, equal blocks share a plan, and the samples were right."""
    model, reference = gpt2(), gpt2()
    windows = text(4).columns["input_ids"]
    sample = {"input_ids": windows, "labels": windows}
    blocks = list(model.transformer.h)
    predicted = rematerialize_blocks(model, blocks, (), sample, budget="60%", planner="auto{effort=1}", ranks=1)

    def step(model: torch.nn.Module) -> torch.Tensor:
        torch.manual_seed(0)
        loss: torch.Tensor = model(**sample).loss
        loss.backward()
        return loss

    assert torch.equal(step(model), step(reference))
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert ours.grad is not None
        assert torch.equal(ours.grad, theirs.grad)
    plans = [lowtide.plans(block) for block in blocks]
    assert [len(found) for found in plans] == [1] * len(blocks), "the samples were not what the blocks are called with"
    assert len({found[0].budget_bytes for found in plans}) == 1
    model.zero_grad()
    assert lowtide.measure(step, model).peak_bytes <= predicted


def test_a_block_that_is_not_called() -> None:
    calls = BlockCalls(["layer"])
    with pytest.raises(lowtide.PlanError, match="'layer' is not called"):
        calls.samples()
