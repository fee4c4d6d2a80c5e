"""What ``test_fsdp`` runs under torchrun: ``python -m tests.integrations.fsdp_program SCENARIO...``."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import lowtide
from lowtide.demo.gpt2 import Shape, build_model, draw_batches, load_corpus
from lowtide.device.cpu import Cpu
from lowtide.ir import simulate
from lowtide.program.distributed.sharded import Gather
from tests.integrations.collectives import recorded
from tests.integrations.launch import say
from tests.integrations.scenarios import local, perform
from tests.integrations.tp_program import BATCH, LENGTH, VOCABULARY, Llama, parallel
from tests.support.training import QUICK

SHAPE = Shape(layers=4, width=64, heads=2, context=64, batch=4)
_PLANNER = QUICK


@dataclass(slots=True)
class Run:
    """A training of a sharded model."""

    model: Any
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)

    def train(self, data: Sequence[torch.Tensor], between: Callable[[Run], None] = lambda run: None) -> None:
        for batch in data:

            def compute(batch: torch.Tensor = batch) -> None:
                outputs = self.model(input_ids=batch, labels=batch)  # held to the end, as budgets assume
                outputs.loss.backward()
                self.losses.append(outputs.loss.item())

            self.peaks.append(lowtide.measure(compute).peak_bytes)
            between(self)
            self.optimizer.step()
            self.optimizer.zero_grad()


def make(
    budget: int | str | None = None, *, prepare: Callable[[Any], None] = lambda model: None, **options: Any
) -> Run:
    """GPT-2 with dropout; every block sharded, then the rest."""
    torch.manual_seed(dist.get_rank())
    model: Any = build_model(SHAPE)
    prepare(model)
    for block in model.transformer.h:
        fully_shard(block, **options)
    fully_shard(model, **options)
    if budget is not None:
        batch = batches(1)[0]
        lowtide.rematerialize(model, (), {"input_ids": batch, "labels": batch}, budget=budget, planner=_PLANNER)
    torch.manual_seed(dist.get_rank())
    return Run(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3))


def batches(steps: int) -> list[torch.Tensor]:
    return draw_batches(load_corpus(200_000), SHAPE, steps, seed=dist.get_rank())


def assert_same(ours: Run, reference: Run) -> None:
    assert ours.losses == reference.losses, (ours.losses, reference.losses)
    mine, theirs = ours.model.state_dict(), reference.model.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(local(mine[name]), local(theirs[name])) for name in mine)


def seeded(*runs: Run) -> Iterator[Run]:
    """Each from the same state of the generator on."""
    for run in runs:
        torch.manual_seed(dist.get_rank())
        yield run


def of_all_ranks(peaks: Sequence[int]) -> int:
    """The largest: all ranks must be given one budget, and gloo's copies make for other peaks of FSDP2's own."""
    found = torch.tensor(max(peaks))
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return int(found)


def plan_of(run: Run) -> lowtide.Plan:
    return lowtide.plans(run.model)[-1]


def losses_and_peaks(fractions: Sequence[float] = (0.5, 0.3)) -> None:
    """Losses and parameters equal to FSDP2 alone, and every rank's peak the predicted one, at parts of FSDP2's own."""
    reference = make()
    reference.train(batches(4))
    alone = of_all_ranks(reference.peaks[1:])
    for fraction in fractions:
        ours = make(int(fraction * alone))
        ours.train(batches(4))
        assert_same(ours, reference)
        plan = plan_of(ours)
        assert plan.peak_bytes <= plan.budget_bytes == int(fraction * alone)
        assert all(0.99 * plan.peak_bytes <= peak <= plan.peak_bytes for peak in ours.peaks[1:]), (
            ours.peaks,
            plan.peak_bytes,
        )
        say(f"at {fraction}: peaks {ours.peaks}, predicted {plan.peak_bytes}, FSDP2 alone {alone}")


def losses_and_peaks_at_little() -> None:
    """The same at a fifth."""
    losses_and_peaks((0.2,))


def collectives_in_one_order() -> None:
    """All ranks run the same ones; little memory makes for more gathers, never for more reductions."""
    counts = {}
    for budget in (None, "100%", "18%"):
        run = make(budget)
        run.train(batches(1))
        with recorded() as found:
            run.train(batches(1))
        counts[budget] = [sum(name in each for each in found) for name in ("all_gather", "reduce")]
    units = SHAPE.layers + 1
    assert counts["100%"] == [units, units]
    assert counts["18%"][0] > units
    assert counts["18%"][1] == counts[None][1] == units


def beside_computing() -> None:
    """As on an accelerator, but by gloo's threads: gathers and reductions are begun, other operators run, then they are waited
    for; equal to the bit, and in one order."""
    reference = make()
    reference.train(batches(3))
    begun = [0, 0]  # under way, and the most at once
    original = Gather.begin

    def counted(self: Gather) -> Any:
        begun[0] += 1
        begun[1] = max(begun)
        end = original(self)

        def ended() -> Any:
            begun[0] -= 1
            return end()

        return ended

    with mock.patch.object(Cpu, "overlaps", True), mock.patch.object(Gather, "begin", counted):
        for budget in ("100%", "30%"):
            ours = make(budget)
            ours.train(batches(2))
            with recorded():
                ours.train(batches(3)[2:])
            assert_same(ours, reference)
            plan = plan_of(ours)
            timing = simulate(plan.graph, plan.costs, plan.schedule).timing
            assert timing.exposed_ns < timing.collective_ns
    assert begun[0] == 0
    assert begun[1] > 1


def policies() -> None:
    """Mixed precision, parameters in host memory, parameters that stay gathered, and a reduction that divides otherwise."""
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    cast = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.bfloat16)

    def divided(model: Any) -> None:
        for block in model.transformer.h:
            block.set_force_sum_reduction_for_comms(True)  # gloo has no other that divides
            block.set_gradient_divide_factor(3.0)

    for options, after in (
        ({"mp_policy": half}, None),
        ({"mp_policy": cast}, None),
        ({"offload_policy": CPUOffloadPolicy(pin_memory=False)}, None),
        ({"reshard_after_forward": False}, None),
        ({}, divided),
    ):
        ours, reference = make("50%", **options), make(**options)
        for run in seeded(ours, reference):
            if after is not None:
                after(run.model)
            run.train(batches(3))
        assert_same(ours, reference)
        assert max(ours.peaks[1:]) <= plan_of(ours).peak_bytes


def frozen_uneven_and_tied() -> None:
    """Parameters that are not trained, that do not divide evenly or into single elements, and units of several modules."""

    def frozen(model: Any) -> None:
        model.transformer.wte.requires_grad_(False)
        model.transformer.h[1].requires_grad_(False)
        model.transformer.h[2].ln_1.weight = nn.Parameter(torch.randn_like(model.transformer.h[2].ln_1.weight))

    ours, reference = make("50%", prepare=frozen), make(prepare=frozen)
    for run in seeded(ours, reference):
        run.train(batches(3))
    assert_same(ours, reference)

    for groups in ([[0], [1, 2], [3]], [[0, 1, 2, 3]]):
        runs = []
        for budget in ("100%", None):
            torch.manual_seed(0)
            layers = (nn.Sequential(nn.Linear(37, 37), nn.Tanh()) for _ in range(4))
            model = nn.Sequential(*layers, nn.Linear(37, 3), nn.Linear(3, 2))  # of whose bias each rank has one element
            for group in groups:
                fully_shard([model[index] for index in group])
            fully_shard(model)
            torch.manual_seed(dist.get_rank())
            data = torch.randn(5, 64, 37)
            if budget:
                lowtide.rematerialize(model, (data[0],), budget=budget, planner=_PLANNER)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            for x in data:
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            runs.append([local(p) for p in model.parameters()])
        assert all(torch.equal(one, two) for one, two in zip(*runs, strict=True))


def accumulation_and_clipping() -> None:
    """Gradients of several passes without a reduction between, then one norm of all; and passes between which nobody looks."""

    def step(run: Run, data: Sequence[torch.Tensor]) -> None:
        for index, batch in enumerate(data):
            run.model.set_requires_gradient_sync(index + 1 == len(data))
            loss = run.model(input_ids=batch, labels=batch).loss
            loss.backward()
            run.losses.append(loss.item())
        norm = nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
        run.losses.append(float(local(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)))
        run.optimizer.step()
        run.optimizer.zero_grad()

    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for options in ({}, {"mp_policy": half}):
        ours, reference = make("50%", **options), make(**options)
        for run in seeded(ours, reference):
            for _ in range(2):
                step(run, batches(3))
            run.model.set_requires_gradient_sync(True)
            for batch in batches(2):  # added to what is reduced already
                run.model(input_ids=batch, labels=batch).loss.backward()
            run.optimizer.step()
        assert_same(ours, reference)


def evaluated_and_restored() -> None:
    """Evaluations and a restored model are FSDP2's own."""
    data = batches(4)
    ours, reference = make("50%"), make()
    for run in seeded(ours, reference):
        run.train(data[:1])
        run.model.eval()
        with torch.no_grad():
            run.losses.append(run.model(input_ids=data[1], labels=data[1]).loss.item())
        run.model.train()
        run.train(data[1:3])
    assert max(ours.peaks[1:]) <= plan_of(ours).peak_bytes
    lowtide.restore(ours.model)
    for run in seeded(ours, reference):
        run.train(data[3:])
    assert_same(ours, reference)
    assert ours.peaks[3] == reference.peaks[3]


def saved_and_resumed() -> None:
    """A distributed checkpoint of a planned run is resumed by a plain one, and the other way round."""
    data = batches(6)
    reference = make()
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


def from_meta() -> None:
    """Parameters that are made after sharding; the model is rematerialized before they are, or afterwards."""
    runs = []
    for when in ("before", "after", "never"):
        with torch.device("meta"):
            model: Any = build_model(SHAPE)
        if when == "before":
            lowtide.rematerialize(model, budget="50%", planner=_PLANNER)
        for block in model.transformer.h:
            fully_shard(block)
        fully_shard(model)
        model.to_empty(device="cpu")
        torch.manual_seed(0)
        for parameter in model.parameters():
            nn.init.normal_(local(parameter), std=0.02)
        for name, buffer in model.named_buffers():
            raise AssertionError(f"{name} {buffer.shape} is not set")
        if when == "after":
            lowtide.rematerialize(model, budget="50%", planner=_PLANNER)
        torch.manual_seed(dist.get_rank())
        run = Run(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        run.train(batches(3))
        runs.append(run)
    for run in runs[:2]:
        assert len(lowtide.plans(run.model)) == 1
        assert_same(run, runs[2])


def other_shapes() -> None:
    """Lengths that differ from rank to rank and from step to step: one order for all, whoever comes first."""
    lengths = [(64, 64), (64, 40), (40, 64), (33, 33), (24, 64), (48, 48)]
    data = [batch[:, : length[dist.get_rank() % 2]] for batch, length in zip(batches(6), lengths, strict=True)]
    ours, reference = make("30%"), make()
    for run in seeded(ours, reference):
        run.train(data)
    assert_same(ours, reference)
    assert all(plan.peak_bytes <= plan.budget_bytes for plan in lowtide.plans(ours.model))
    assert max(ours.peaks[1:]) <= plan_of(ours).budget_bytes


def replicas_of_shards() -> None:
    """Shards over two ranks, replicated over two (HSDP); and no reduction among replicas for a while."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    ours, reference = make("50%", mesh=mesh), make(mesh=mesh)
    for run in seeded(ours, reference):
        run.train(batches(2))
        run.model.set_requires_all_reduce(False)
        batch = batches(1)[0]
        run.model(input_ids=batch, labels=batch).loss.backward()
        run.model.set_requires_all_reduce(True)
        run.train(batches(1))
    assert_same(ours, reference)


def sharded_and_parallel() -> None:
    """Parameters that tensor parallelism has distributed over one dimension of a mesh, sharded over the other (2D)."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for by_sequence in (False, True):
        trained = []
        for budget in (None, 0.6):
            torch.manual_seed(0)
            model = parallel(Llama(), mesh["tp"], by_sequence=by_sequence)
            for block in model.blocks:
                fully_shard(block, mesh=mesh["dp"])
            fully_shard(model, mesh=mesh["dp"])
            torch.manual_seed(mesh["dp"].get_local_rank())
            data = torch.randint(VOCABULARY, (4, BATCH, LENGTH))
            if budget:
                alone = int(budget * of_all_ranks(trained[0].peaks[1:]))
                lowtide.rematerialize(model, (data[0], data[0]), budget=alone, planner=_PLANNER)
            run = Run(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
            for tokens in data:

                def compute(tokens: torch.Tensor = tokens, run: Run = run) -> None:
                    loss = run.model(tokens, tokens)
                    loss.backward()
                    run.losses.append(loss.item())

                run.peaks.append(lowtide.measure(compute).peak_bytes)
                run.optimizer.step()
                run.optimizer.zero_grad()
            trained.append(run)
        reference, ours = trained
        assert_same(ours, reference)
        assert max(ours.peaks[1:]) <= plan_of(ours).budget_bytes, (ours.peaks, plan_of(ours))
        with recorded():
            ours.model(data[0], data[0]).backward()
        say(
            f"by sequence {by_sequence}: peaks {ours.peaks}, predicted {plan_of(ours).peak_bytes}, alone {reference.peaks}"
        )


def killed() -> None:
    """The last rank dies between its passes."""
    run = make("50%")
    run.train(batches(1))
    batch = batches(1)[0]
    loss = run.model(input_ids=batch, labels=batch).loss
    if dist.get_rank() == dist.get_world_size() - 1:
        os._exit(3)
    loss.backward()


def as_on_paper() -> None:
    """A pass that keeps everything, beside what another process says of it that has neither data nor ranks."""
    run = make("100%")
    run.train(batches(2))
    paper = subprocess.run(
        [sys.executable, "-m", "tests.integrations.on_paper", str(dist.get_world_size())],
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    say(f"on paper {int(paper.stdout.split()[-1])}, measured {run.peaks[-1]}")


def mistakes_are_named() -> None:
    run = make()
    batch = batches(1)[0]
    sample = {"input_ids": batch, "labels": batch}
    for attempt, words in (
        (lambda: lowtide.rematerialize(run.model, (), sample, budget="2%"), "no schedule"),
        (lambda: lowtide.rematerialize(_only_blocks(), (), sample, budget="60%"), "fully_shard(model) too"),
    ):
        try:
            attempt()
        except lowtide.LowtideError as error:
            assert words in str(error), error
        else:
            raise AssertionError(f"no error that says {words!r}")
    run.train(batches(1))  # as if nothing had been asked


def _only_blocks() -> Any:
    model: Any = build_model(SHAPE)
    for block in model.transformer.h:
        fully_shard(block)
    return model


if __name__ == "__main__":
    perform(
        losses_and_peaks,
        losses_and_peaks_at_little,
        collectives_in_one_order,
        beside_computing,
        policies,
        frozen_uneven_and_tied,
        accumulation_and_clipping,
        evaluated_and_restored,
        saved_and_resumed,
        from_meta,
        other_shapes,
        replicas_of_shards,
        sharded_and_parallel,
        as_on_paper,
        killed,
        mistakes_are_named,
    )
