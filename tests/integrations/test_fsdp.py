"""FSDP2 over blocks with plans of their own, two processes on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

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
    """In one process, unsharded: the prediction holds, and the samples were right."""
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
    model.zero_grad()
    assert lowtide.measure(step, model).peak_bytes <= predicted


class WideHead(torch.nn.Module):
    """Blocks that are small beside the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh()) for _ in range(2)
        )
        self.head = torch.nn.Linear(16, 2048)

    def forward(self, x: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return torch.nn.functional.cross_entropy(self.head(x), classes)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_what_surrounds_the_blocks_writes_over_nothing() -> None:
    """The gradient of a loss is new memory where PyTorch runs it."""
    model, sample = WideHead(), (torch.randn(64, 16), torch.zeros(64, dtype=torch.long))
    predicted = rematerialize_blocks(model, list(model.blocks), sample, budget="100%")

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)

    def step() -> None:
        model(*sample).backward()

    step()
    model.zero_grad()
    measured = lowtide.measure(step).peak_bytes
    assert measured <= predicted <= measured + 4096


@pytest.mark.usefixtures("one_rank")
def test_a_sharded_block_is_planned_for_other_shapes() -> None:
    """What FSDP2 keeps of its own in a module is no part of the model."""
    model, reference = gpt2(), gpt2()
    windows = text(4).columns["input_ids"]
    blocks = list(model.transformer.h)
    sample = {"input_ids": windows, "labels": windows}
    rematerialize_blocks(model, blocks, (), sample, budget="60%", planner="auto{effort=1}")
    for module in (model, reference):
        for block in module.transformer.h:
            fully_shard(block)
        fully_shard(module)
    for rows in (4, 3, 3):
        for module in (model, reference):
            torch.manual_seed(0)
            module(input_ids=windows[:rows], labels=windows[:rows]).loss.backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.grad.to_local(), theirs.grad.to_local())
    assert {len(lowtide.plans(block)) for block in blocks} == {2}


def test_a_block_that_is_not_called() -> None:
    calls = BlockCalls(["layer"])
    with pytest.raises(lowtide.PlanError, match="'layer' is not called"):
        calls.samples()
