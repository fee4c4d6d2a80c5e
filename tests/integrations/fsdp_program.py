"""What ``test_fsdp`` runs under torchrun: ``python -m tests.integrations.fsdp_program SCENARIO...``."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import lowtide
from lowtide.demo.gpt2 import Shape, build_model, draw_batches, load_corpus
from lowtide.integrations.fsdp import rematerialize_blocks
from tests.integrations.launch import say
from tests.integrations.scenarios import perform

SHAPE = Shape(layers=4, width=64, heads=2, context=64, batch=4)
_STEPS = 6


@dataclass(slots=True)
class Run:
    """A training of a sharded model; ``predicted`` and ``budget`` bytes where its blocks were planned."""

    model: Any
    optimizer: torch.optim.Optimizer
    predicted: int = 0
    losses: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)

    def train(self, data: Sequence[torch.Tensor]) -> None:
        for batch in data:

            def compute(batch: torch.Tensor = batch) -> None:
                loss = self.model(input_ids=batch, labels=batch).loss
                loss.backward()
                self.losses.append(loss.item())

            self.peaks.append(lowtide.measure(compute).peak_bytes)
            self.optimizer.step()
            self.optimizer.zero_grad()


def make(budget: int | str | None, **options: Any) -> Run:
    """GPT-2 with dropout; every block sharded, then the rest."""
    torch.manual_seed(dist.get_rank())
    model: Any = build_model(SHAPE)
    blocks: list[nn.Module] = list(model.transformer.h)
    predicted = 0
    if budget is not None:
        sample = batches(1)[0]
        predicted = rematerialize_blocks(
            model, blocks, (), {"input_ids": sample, "labels": sample}, budget=budget, planner="auto{effort=1}"
        )
    for block in blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return Run(model, torch.optim.AdamW(model.parameters(), lr=1e-3), predicted)


def batches(steps: int) -> list[torch.Tensor]:
    return draw_batches(load_corpus(200_000), SHAPE, steps, seed=dist.get_rank())


def assert_same(ours: Run, reference: Run) -> None:
    assert ours.losses == reference.losses, (ours.losses, reference.losses)
    mine, theirs = ours.model.state_dict(), reference.model.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name].to_local(), theirs[name].to_local()) for name in mine)


def losses_and_peaks() -> None:
    """Losses and parameters equal to FSDP2 alone, every rank's peak within the budget, and the prediction close to it."""
    reference = make(None)
    reference.train(batches(_STEPS))
    alone = max(reference.peaks[1:])
    for fraction in (0.55, 0.45):
        budget = int(fraction * alone)
        ours = make(budget)
        ours.train(batches(_STEPS))
        assert_same(ours, reference)
        peak = max(ours.peaks[1:])
        assert ours.predicted <= budget
        assert peak <= ours.predicted, (peak, ours.predicted)
        kept = lowtide.measure(keep_outputs, ours.model, batches(1)[0]).peak_bytes
        slack = ours.predicted - kept
        assert 0 <= slack <= 2 * parameter_bytes(ours.model.transformer.h[0]) + 1024, (slack, kept, ours.predicted)
        say(f"peak {peak}, {kept} with outputs, predicted {ours.predicted}, budget {budget}, FSDP2 alone {alone}")


def keep_outputs(model: Any, batch: torch.Tensor) -> Any:
    """A pass whose outputs the caller holds to the end, as budgets assume."""
    outputs = model(input_ids=batch, labels=batch)
    outputs.loss.backward()
    return outputs


def parameter_bytes(block: Any) -> int:
    """A collective's copy, which gloo may hold for a moment more; while the next one runs there are two."""
    return sum(parameter.numel() * parameter.element_size() for parameter in block.parameters())


def gathers_are_as_without_plans() -> None:
    """The same collectives in the same order, whatever is computed again."""

    def collectives(run: Run) -> list[str]:
        run.train(batches(2))
        names = []
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            run.train(batches(1))
        for event in sorted(profiler.events(), key=lambda event: event.time_range.start):
            if event.name in ("FSDP::all_gather", "c10d::_allgather_base_", "c10d::_reduce_scatter_base_"):
                names.append(event.name)
        return names

    expected = collectives(make(None))
    assert len(expected) > 2 * SHAPE.layers
    assert collectives(make("60%")) == expected


def saved_and_resumed() -> None:
    """A distributed checkpoint of a planned run is resumed by a plain one, and the other way round."""
    data = batches(_STEPS)
    reference = make(None)
    reference.train(data)
    for first, second in (("60%", None), (None, "60%"), ("60%", "70%")):
        begun = make(first)
        begun.train(data[:3])
        names: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(names)
        model, optimizer = get_state_dict(begun.model, begun.optimizer)
        checkpoint.save({"model": model, "optimizer": optimizer}, checkpoint_id=names[0])
        generator = torch.get_rng_state()
        resumed = make(second)
        model, optimizer = get_state_dict(resumed.model, resumed.optimizer)
        checkpoint.load({"model": model, "optimizer": optimizer}, checkpoint_id=names[0])
        set_state_dict(resumed.model, resumed.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        torch.set_rng_state(generator)
        resumed.losses += begun.losses
        resumed.train(data[3:])
        assert_same(resumed, reference)


def other_shapes_and_precision() -> None:
    """A short last batch is planned after sharding, under the same bytes; so is mixed precision."""
    data = batches(4)
    data[2] = data[2][:2]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for options in ({}, {"mp_policy": policy}):
        ours, reference = make("60%", **options), make(None, **options)
        for run in (ours, reference):
            torch.manual_seed(dist.get_rank())
            run.train(data)
        assert_same(ours, reference)
        plans = lowtide.plans(ours.model.transformer.h[0])
        assert len(plans) >= 2
        assert all(plan.peak_bytes <= plan.budget_bytes for plan in plans)


def mistakes_are_named() -> None:
    run = make(None)
    assert isinstance(run.model, FSDPModule)
    sample = batches(1)[0]
    for attempt, words in (
        (lambda: rematerialize_blocks(run.model, list(run.model.transformer.h), (sample,), budget="60%"), "before"),
        (lambda: lowtide.rematerialize(run.model, (sample,), budget="60%"), "unit of fully_shard"),
        (lambda: make("2%"), "would do"),
    ):
        try:
            attempt()
        except lowtide.LowtideError as error:
            assert words in str(error), error
        else:
            raise AssertionError(f"no error that says {words!r}")


if __name__ == "__main__":
    perform(
        losses_and_peaks,
        gathers_are_as_without_plans,
        saved_and_resumed,
        other_shapes_and_precision,
        mistakes_are_named,
    )
