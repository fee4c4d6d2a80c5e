"""FSDP2: models sharded by ``fully_shard``, planned as a whole, on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import lowtide
from lowtide.ir.graph import GATHER_TARGET, REDUCE_TARGET
from lowtide.units import format_bytes
from tests.integrations.launch import ranks_of, torchrun
from tests.integrations.trainers import gpt2, text
from tests.support.training import QUICK
from tests.support.versions import needs_known_fsdp2

pytestmark = needs_known_fsdp2

_PROGRAM = "tests.integrations.fsdp_program"


def test_losses_and_peaks_of_two_ranks() -> None:
    assert torchrun(_PROGRAM, "losses_and_peaks_at_little", "collectives_in_one_order").count("passed") == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "scenario",
    [
        "losses_and_peaks",
        "other_shapes",
        "beside_computing",
        "policies",
        "frozen_uneven_and_tied",
        "accumulation_and_clipping",
        "evaluated_and_restored",
        "saved_and_resumed",
        "from_meta",
        "mistakes_are_named",
    ],
)
def test_scenario(scenario: str) -> None:
    assert torchrun(_PROGRAM, scenario).count("passed") == 2


@pytest.mark.slow
def test_four_ranks() -> None:
    assert (
        torchrun(_PROGRAM, "losses_and_peaks", "replicas_of_shards", "sharded_and_parallel", processes=4).count(
            "passed"
        )
        == 12
    )


@pytest.mark.slow
def test_a_killed_rank_ends_the_other() -> None:
    """With the error of the collective that it did not come to."""
    codes, error = ranks_of(_PROGRAM, "killed")
    assert codes == [1, 3]
    assert "ExecutionError" in error
    assert "another process" in error


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded() -> torch.nn.Module:
    model = gpt2()
    for block in model.transformer.h:
        fully_shard(block)
    return fully_shard(model)


def step(model: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    outputs = model(input_ids=rows, labels=rows)
    outputs.loss.backward()
    return outputs.loss


@pytest.mark.usefixtures("one_rank")
def test_a_plan_gathers_and_reduces() -> None:
    """The program's own operators, counted with all that they make; losses and gradients are those of FSDP2."""
    model, reference, rows = sharded(), sharded(), text(4).columns["input_ids"]
    lowtide.rematerialize(model, (), {"input_ids": rows, "labels": rows}, budget="40%", planner=QUICK)
    (plan,) = lowtide.plans(model)
    targets = [op.target for op in plan.graph.ops]
    assert targets.count(GATHER_TARGET) == targets.count(REDUCE_TARGET) == len(model.transformer.h) + 1
    assert torch.equal(step(model, rows), step(reference, rows))
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.grad.to_local(), theirs.grad.to_local())
    for module in (model, reference):
        module.zero_grad()
    measured = lowtide.measure(step, model, rows).peak_bytes
    assert measured <= plan.peak_bytes < lowtide.measure(step, reference, rows).peak_bytes


@pytest.mark.usefixtures("one_rank")
def test_a_total_budget_counts_shards() -> None:
    """The parameters, and two states of each, beside the pass."""
    model, rows = sharded(), text(4).columns["input_ids"]
    sample = {"input_ids": rows, "labels": rows}
    lowtide.rematerialize(model, (), sample, total_budget="100%", planner="keep-all")
    (plan,) = lowtide.plans(model)
    shards = sum(p.to_local().untyped_storage().nbytes() for p in model.parameters())
    assert f"optimizer states {format_bytes(2 * shards)}" in plan.outside
    assert f"parameters, buffers and inputs {format_bytes(shards + rows.untyped_storage().nbytes())}" in plan.outside


@pytest.mark.usefixtures("one_rank")
def test_shards_that_are_written_between_the_passes() -> None:
    """A backward pass that would gather other values says so."""
    model, rows = sharded(), text(4).columns["input_ids"]
    lowtide.rematerialize(model, (), {"input_ids": rows, "labels": rows}, budget="40%", planner=QUICK)
    loss = model(input_ids=rows, labels=rows).loss
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    with pytest.raises(lowtide.ExecutionError, match="wte"):
        loss.backward()


@pytest.mark.usefixtures("one_rank")
def test_hooks_on_blocks_and_on_the_root() -> None:
    """Those of others stay, FSDP2's are put back where they were."""
    model, reference, rows = sharded(), sharded(), text(4).columns["input_ids"]

    def doubled(module: torch.nn.Module, args: tuple[torch.Tensor, ...], result: torch.Tensor) -> torch.Tensor:
        return result * 2

    for one in (model, reference):
        one.transformer.h[0].register_forward_hook(doubled)
    before = [dict(hooks) for hooks in (model._forward_pre_hooks, model._forward_hooks)]
    lowtide.rematerialize(model, (), {"input_ids": rows, "labels": rows}, budget="50%", planner=QUICK)
    assert torch.equal(step(model, rows), step(reference, rows))
    lowtide.restore(model)
    assert [dict(hooks) for hooks in (model._forward_pre_hooks, model._forward_hooks)] == before
    assert torch.equal(step(model, rows), step(reference, rows))


@pytest.mark.usefixtures("one_rank")
def test_sharded_after_it_was_rematerialized() -> None:
    """As trainers do: the plan of its first call, inside of FSDP2's own hooks, is that of the sharded model."""
    reference, rows = sharded(), text(4).columns["input_ids"]
    model = lowtide.rematerialize(gpt2(), budget="40%", planner=QUICK)
    for block in model.transformer.h:
        fully_shard(block)
    fully_shard(model)
    before = [dict(hooks) for hooks in (model._forward_pre_hooks, model._forward_hooks)]
    for _ in range(2):
        assert torch.equal(step(model, rows), step(reference, rows))
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.grad.to_local(), theirs.grad.to_local())
    (plan,) = lowtide.plans(model)
    model.zero_grad()
    assert GATHER_TARGET in [op.target for op in plan.graph.ops]
    assert lowtide.measure(step, model, rows).peak_bytes <= plan.peak_bytes
    lowtide.restore(model)
    assert [dict(hooks) for hooks in (model._forward_pre_hooks, model._forward_hooks)] == before


class Counting(torch.nn.Module):
    """A count that a factor follows from, and layers that hold their parameters in a list as well."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = torch.nn.Linear(8, 8), torch.nn.LSTM(8, 16, num_layers=2)
        self.steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        hidden: torch.Tensor = self.body(self.embed(x))[0]
        return hidden.square().mean() * min(1.0, self.steps / 4)


@pytest.mark.usefixtures("one_rank")
def test_numbers_that_are_counted_on() -> None:
    """They are inputs of one program, and counted as without a plan."""
    torch.manual_seed(0)
    model = Counting()
    reference = copy.deepcopy(model)
    for one in (model, reference):
        fully_shard(one)
    x = torch.randn(4, 2, 8)
    lowtide.rematerialize(model, (x,), budget="100%", planner="keep-all")
    for _ in range(6):
        losses = [one(x) for one in (model, reference)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
        assert model.steps == reference.steps
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.grad.to_local(), theirs.grad.to_local())
    assert len(lowtide.plans(model)) <= 2  # one for either answer of the comparison


class Attending(torch.nn.Module):
    """A block that reads what others read too, several times."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.other = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.own(x) * self.other(memory) + memory.sin()) + 0.1 * memory


class Shared(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(16, 16)
        self.blocks = torch.nn.ModuleList(Attending() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = torch.relu(self.first(x))
        x = memory.cos()
        for block in self.blocks:
            x = block(x, memory) + memory
        return (x * memory).square().mean()


@pytest.mark.usefixtures("one_rank")
def test_gradients_are_added_in_the_order_of_fsdp2() -> None:
    """A block's gradients for what others read as well arrive together, when its backward pass has ended."""
    models = [Shared() for _ in range(3)]
    for model in models[:2]:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    x = torch.randn(64, 16)
    lowtide.rematerialize(models[0], (x,), budget="80%")
    gradients = []
    for model in models:
        model(x).backward()
        gradients.append([p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in model.parameters()])
    ours, sharded, plain = gradients
    assert all(map(torch.equal, ours, sharded))
    assert not all(map(torch.equal, plain, sharded)), "the order is another without sharding, or this shows nothing"


@pytest.mark.usefixtures("one_rank")
def test_a_parameter_as_a_result_is_refused() -> None:
    class Returning(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return super().forward(x), self.weight

    model = fully_shard(Returning(8, 8))
    with pytest.raises(lowtide.CaptureError, match="returns a parameter"):
        lowtide.rematerialize(model, (torch.randn(4, 8),), budget="100%")
