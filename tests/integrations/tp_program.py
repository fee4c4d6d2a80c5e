"""What ``test_tensor_parallel`` runs under torchrun: ``python -m tests.integrations.tp_program SCENARIO...``."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import lowtide
from lowtide.device.cpu import Cpu
from tests.integrations.collectives import recorded
from tests.integrations.launch import say
from tests.integrations.scenarios import perform

WIDTH, HEADS, LAYERS, VOCABULARY, LENGTH, BATCH = 64, 4, 3, 96, 32, 4
LOGITS_BYTES = BATCH * LENGTH * VOCABULARY * 4  # the largest of what gloo may hold a copy of for a moment more
_STEPS = 6


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        shape = (rows, length, -1, WIDTH // HEADS)
        q, k, v = (part(x).view(shape).transpose(1, 2) for part in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(rows, length, -1))  # type: ignore[no-any-return]


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = (nn.Linear(WIDTH, 4 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.gated, self.dropout = Attention(), Gated(), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.first_norm(x)))
        return x + self.dropout(self.gated(self.second_norm(x)))  # type: ignore[no-any-return]


class Llama(nn.Module):
    """A small one; with ``labels`` it returns the loss."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def parallel(model: Llama, mesh: DeviceMesh, *, by_sequence: bool, whole_logits: bool = True) -> Llama:
    """``model`` by columns and rows; ``by_sequence``: norms and residuals on parts of the sequence."""
    between = Shard(1) if by_sequence else Replicate()
    last = Replicate() if whole_logits else Shard(-1)
    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=last, use_local_output=whole_logits),
    }
    gathered: dict[str, Any] = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    inner: dict[str, Any] = {
        **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
        "attention.out": RowwiseParallel(output_layouts=between),
        **{f"gated.{name}": ColwiseParallel() for name in ("up", "gate")},
        "gated.down": RowwiseParallel(output_layouts=between),
    }
    if by_sequence:
        plan["norm"] = SequenceParallel()
        inner |= {name: SequenceParallel() for name in ("first_norm", "second_norm")}
        inner |= {name: PrepareModuleInput(**gathered) for name in ("attention", "gated")}
    parallelize_module(model, mesh, plan)
    for block in model.blocks:
        parallelize_module(block, mesh, inner)
    return model


@dataclass(slots=True)
class Run:
    """A training: losses, the gradients of every step with how they are distributed, and measured peaks."""

    model: Llama
    losses: list[float] = field(default_factory=list)
    gradients: list[Any] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)

    def train(self, loss_of: Callable[[Llama, torch.Tensor], torch.Tensor], data: Sequence[torch.Tensor]) -> Run:
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=False)
        torch.manual_seed(1)
        for batch in data:

            def compute(batch: torch.Tensor = batch) -> None:
                loss = loss_of(self.model, batch)
                loss.backward()  # type: ignore[no-untyped-call]
                self.losses.append((loss.full_tensor() if isinstance(loss, DTensor) else loss).item())

            self.peaks.append(lowtide.measure(compute).peak_bytes)
            self.gradients.append([_parts(parameter.grad) for parameter in self.model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
        return self


def _parts(gradient: torch.Tensor | None) -> Any:
    if isinstance(gradient, DTensor):
        return gradient.to_local().clone(), gradient.placements, gradient.shape
    assert gradient is not None
    return gradient.clone(), None, gradient.shape


def assert_same(ours: Run, reference: Run) -> None:
    assert ours.losses == reference.losses, (ours.losses, reference.losses)
    names = [name for name, _ in ours.model.named_parameters()]
    for step, (mine, theirs) in enumerate(zip(ours.gradients, reference.gradients, strict=True)):
        for name, (a, *placed), (b, *expected) in zip(names, mine, theirs, strict=True):
            assert placed == expected, (step, name, placed, expected)
            assert torch.equal(a, b), (step, name)


def make(**options: Any) -> Llama:
    torch.manual_seed(0)
    model = Llama(options.pop("dropout", 0.0))
    return parallel(model, init_device_mesh("cpu", (dist.get_world_size(),)), **options)


def planned(model: Llama, *sample: torch.Tensor, budget: int | str = "60%", **options: Any) -> Llama:
    options = {"planner": "auto{effort=1}", "on_capture_error": "error", **options}
    return lowtide.rematerialize(model, sample, budget=budget, **options)


def batches(steps: int, length: int = LENGTH) -> list[torch.Tensor]:
    """The same on every rank."""
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(VOCABULARY, (BATCH, length), generator=generator) for _ in range(steps)]


def own_loss(model: Llama, batch: torch.Tensor) -> torch.Tensor:
    return model(batch, batch)  # type: ignore[no-any-return]


def everywhere(thing: Any) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, thing)
    return gathered


def bits_and_peaks() -> None:
    """Losses, gradients and their placements as without lowtide, one plan, and the measured peak is the predicted one, but for
    a copy that gloo may hold a moment longer."""
    for by_sequence in (False, True):
        reference = Run(make(by_sequence=by_sequence)).train(own_loss, batches(_STEPS))
        sample = batches(1)[0]
        ours = Run(planned(make(by_sequence=by_sequence), sample, sample)).train(own_loss, batches(_STEPS))
        assert_same(ours, reference)
        (plan,) = lowtide.plans(ours.model)
        assert len({str(schedule) for schedule in everywhere(plan.schedule)}) == 1
        assert plan.overhead > 0
        assert plan.peak_bytes <= plan.budget_bytes < 0.65 * min(reference.peaks)
        peaks = sorted(ours.peaks)
        assert peaks[0] == plan.peak_bytes, (peaks, plan.peak_bytes)
        assert peaks[-1] <= plan.peak_bytes + 2 * LOGITS_BYTES, (peaks, plan.peak_bytes)
        how = "by sequence" if by_sequence else "plain"
        say(f"{how}: peaks {peaks}, predicted {plan.peak_bytes}, budget {plan.budget_bytes}, alone {reference.peaks}")


def beside_computing() -> None:
    """As on an accelerator: functional collectives are begun, and waited for where they are needed."""
    sample = batches(1)[0]
    for by_sequence in (False, True):
        reference = Run(make(by_sequence=by_sequence)).train(own_loss, batches(3))
        with mock.patch.object(Cpu, "overlaps", True):
            model = planned(make(by_sequence=by_sequence), sample, sample)
        assert_same(Run(model).train(own_loss, batches(3)), reference)
        assert lowtide.plans(model)[0].costs.collectives_beside


def dropout() -> None:
    sample = batches(1)[0]
    for by_sequence in (False, True):
        options = {"dropout": 0.1, "by_sequence": by_sequence}
        reference = Run(make(**options)).train(own_loss, batches(_STEPS))
        assert_same(Run(planned(make(**options), sample, sample)).train(own_loss, batches(_STEPS)), reference)


def distributed_results() -> None:
    """The logits are a distributed tensor, for a loss in parallel."""

    def loss_of(model: Llama, batch: torch.Tensor) -> torch.Tensor:
        logits = model(batch)
        assert isinstance(logits, DTensor)
        with loss_parallel():
            loss = F.cross_entropy(logits.flatten(0, 1), batch.flatten())
            loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach().requires_grad_()

    options = {"by_sequence": True, "whole_logits": False}
    reference = Run(make(**options)).train(loss_of, batches(3))
    ours = Run(planned(make(**options), batches(1)[0])).train(loss_of, batches(3))
    assert_same(ours, reference)
    assert lowtide.plans(ours.model)[0].overhead > 0


class Deciding(Llama):
    """No single program: it looks at its activations."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x) if x.detach().float().norm() >= 0 else x
        assert labels is not None
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def in_parts() -> None:
    """The blocks have plans of their own, and the step keeps to the budget once its parts are known."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def model() -> Llama:
        torch.manual_seed(0)
        return parallel(Deciding(), mesh, by_sequence=True)

    sample = batches(1)[0]
    reference = Run(model()).train(own_loss, batches(_STEPS))
    budget = int(0.6 * min(reference.peaks))
    ours = Run(planned(model(), sample, sample, budget=budget, on_capture_error="parts"))
    assert_same(ours.train(own_loss, batches(_STEPS)), reference)
    assert len(lowtide.plans(ours.model)) > LAYERS
    assert max(ours.peaks[1:]) <= budget + 2 * LOGITS_BYTES, (ours.peaks, budget)
    say(f"in parts: peaks {ours.peaks}, budget {budget}")


def hooks_on_the_model_itself() -> None:
    """What ``parallelize_module`` puts on the model runs around the plan, and on the sample."""
    mesh, found = init_device_mesh("cpu", (2,)), []
    for plans in (False, True):
        torch.manual_seed(0)
        model = parallelize_module(nn.Linear(WIDTH, WIDTH), mesh, ColwiseParallel(output_layouts=Replicate()))
        x = torch.randn(BATCH, WIDTH, requires_grad=True)
        if plans:
            lowtide.rematerialize(model, (x,), budget="100%", on_capture_error="error")
        for _ in range(2):
            model(x).square().sum().backward()
        found.append([_parts(tensor.grad) for tensor in (x, *model.parameters())])
    assert len(lowtide.plans(model)) == 1
    for (a, *how), (b, *wanted) in zip(*found, strict=True):
        assert how == wanted
        assert torch.equal(a, b)


class Stack(nn.Module):
    """Linear layers on distributed tensors from end to end."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        for number, layer in enumerate(self.layers):
            placement = Shard(number % 2)
            layer.weight = nn.Parameter(distribute_tensor(layer.weight, mesh, [placement]))
            layer.bias = nn.Parameter(
                distribute_tensor(layer.bias, mesh, [Shard(0) if number % 2 == 0 else Replicate()])
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x


def distributed_arguments() -> None:
    """The argument is a distributed tensor, and so are its gradient and the result."""
    mesh = init_device_mesh("cpu", (2,))
    found = []
    for plans in (False, True):
        torch.manual_seed(0)
        model = Stack(mesh)
        given = distribute_tensor(torch.randn(BATCH * LENGTH, WIDTH), mesh, [Replicate()]).requires_grad_()
        if plans:
            lowtide.rematerialize(model, (given,), budget="70%", planner="auto{effort=1}", on_capture_error="error")
        for _ in range(2):
            result = model(given)
            assert isinstance(result, DTensor)
            result.square().mean().backward()
        parts = [_parts(tensor.grad) for tensor in (given, *model.parameters())]
        found.append((result.to_local().detach().clone(), result.placements, parts))
    (theirs, placed, expected), (ours, mine, parts) = found
    assert torch.equal(ours, theirs)
    assert mine == placed
    for (a, *how), (b, *wanted) in zip(parts, expected, strict=True):
        assert how == wanted
        assert torch.equal(a, b)
    assert lowtide.plans(model)[0].overhead > 0


def collectives(model: Llama, batch: torch.Tensor) -> list[str]:
    """Those of a step, in order, with the sizes; equal on all ranks."""
    with recorded() as found:
        own_loss(model, batch).backward()  # type: ignore[no-untyped-call]
    return found


def collectives_in_one_order() -> None:
    """Both ranks run the same collectives in the same order, as many as without a plan: none runs again."""
    for by_sequence in (False, True):
        batch, other = batches(1)[0], batches(1, LENGTH // 2)[0]
        model = make(by_sequence=by_sequence)
        alone = [collectives(model, given) for given in (batch, other)]
        planned(model, batch, batch, budget="55%")
        ours = [collectives(model, given) for given in (batch, other)]
        assert any(plan.overhead > 0 for plan in lowtide.plans(model))
        assert list(map(sorted, ours)) == list(map(sorted, alone)), (ours, alone)
        assert len(ours[0]) > 2 * LAYERS
        say(f"{len(ours[0])} collectives in a step")


def better_plans_and_other_shapes() -> None:
    """Plans that get better while training runs, and batches of other lengths: results stay as they are."""
    data = [batch for length in (LENGTH, LENGTH // 2, LENGTH) for batch in batches(4, length)]
    reference = Run(make(by_sequence=True)).train(own_loss, data)
    ours = Run(planned(make(by_sequence=True), planner="auto"))
    ours.train(own_loss, data)
    assert_same(ours, reference)
    assert len(lowtide.plans(ours.model)) == 2
    lowtide.restore(ours.model)


def killed() -> None:
    """The last rank dies in a backward pass."""
    sample = batches(1)[0]
    model = planned(make(by_sequence=True), sample, sample)
    own_loss(model, sample).backward()  # type: ignore[no-untyped-call]
    if dist.get_rank() == dist.get_world_size() - 1:
        model.norm.weight.register_hook(lambda gradient: os._exit(3))
    own_loss(model, sample).backward()  # type: ignore[no-untyped-call]
    own_loss(model, sample)


if __name__ == "__main__":
    perform(
        bits_and_peaks,
        beside_computing,
        dropout,
        distributed_results,
        distributed_arguments,
        collectives_in_one_order,
        better_plans_and_other_shapes,
        in_parts,
        hooks_on_the_model_itself,
        killed,
    )
