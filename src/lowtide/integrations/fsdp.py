"""FSDP2: a budget for every rank of a model whose blocks are sharded one by one.

``fully_shard`` gathers a unit's parameters before its forward and its backward pass and lets go of them afterwards. So a
planned region must not span units, and each unit becomes a region of its own, between the hooks that gather and reduce:
collectives run exactly where FSDP2 alone runs them, and none can be computed again.

What the regions may take is settled here, before the model is sharded, for the whole model: ``gathers`` knows what FSDP2
itself holds at every event, ``fsdp_constraints`` what lies around the blocks, ``lowtide.sharing`` shares the rest among them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lowtide.api import runtime_of
from lowtide.budget import parse_budget
from lowtide.capture import capture
from lowtide.errors import PlanError
from lowtide.integrations.fsdp_constraints import constraints_of
from lowtide.integrations.gathers import Gathers
from lowtide.integrations.samples import BlockCalls, Sample
from lowtide.pipeline import program_costs, share_planners
from lowtide.program.sharded import is_sharded
from lowtide.runtime.model import Rematerialized
from lowtide.settings import Settings
from lowtide.sharing import Member, choose, peak_bytes

_LOG = logging.getLogger(__name__)


def rematerialize_blocks(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget: int | str,
    planner: str = "auto",
    seed: int = 0,
    ranks: int | None = None,
) -> int:
    """Make each of ``blocks`` train by a plan of its own, so that a rank stays within ``budget``; returns the predicted peak.

    To be called before ``fully_shard(block)`` for every block and ``fully_shard(model)``; ``args`` and ``kwargs`` are a
    sample call of ``model``. The budget is what a forward and backward pass of the sharded model may allocate above what
    was allocated when it began: gathered parameters and buffers of the reductions included, and the model's outputs, as if
    the caller kept them until the end. A percentage is of the peak predicted for the same sharded model without plans.
    Other shapes later are planned under the bytes that each block was given here. ``ranks`` defaults to the process group's
    size.

    Raises ``InfeasibleBudgetError`` where no plans fit, and ``PlanError`` where the model is sharded already.
    """
    _check(model, blocks)
    ranks = ranks or (torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1)
    names = {id(module): name for name, module in model.named_modules()}
    calls = BlockCalls([names[id(block)] for block in blocks])
    with torch.enable_grad():
        program = capture(model, args, kwargs, watch=calls.watch).program
        samples = calls.samples()
        programs = [capture(block, *sample).program for block, sample in zip(blocks, samples, strict=True)]
    constraints = constraints_of(program.graph, program_costs(program), calls.names, Gathers.of(model, blocks, ranks))
    members = [Member(program, program_costs(program)) for program in programs]
    unconstrained = peak_bytes(constraints, [member.eager for member in members])
    settings = Settings(budget=parse_budget(budget, unconstrained), planner=planner, seed=seed)
    assert isinstance(settings.budget, int)
    chosen = choose(members, constraints, settings.budget, *share_planners(settings))
    for block, sample, assignment in zip(blocks, samples, chosen, strict=True):
        if assignment.share is not None:  # else it keeps everything
            share = assignment.share
            _attach(block, sample, replace(settings, budget=share.budget_bytes, between_bytes=share.between_bytes))
    predicted = peak_bytes(constraints, [assignment.footprint for assignment in chosen])
    _LOG.info("planned %d blocks: %d bytes of %d, %d without", len(chosen), predicted, settings.budget, unconstrained)
    return predicted


def _attach(block: nn.Module, sample: Sample, settings: Settings) -> None:
    runtime = Rematerialized(block, settings)
    runtime.prepare(*sample)
    block.forward = runtime


def _check(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    if not blocks:
        raise PlanError(
            "no blocks were given; pass the modules that fully_shard is applied to, say list(model.layers)."
        )
    inside = {id(module): name for name, module in model.named_modules()}
    for block in blocks:
        if id(block) not in inside:
            raise PlanError(f"a {type(block).__name__} among the blocks is not part of the model.")
        if runtime_of(block) is not None:
            raise PlanError(f"block {inside[id(block)]!r} is rematerialized already; call lowtide.restore on it first.")
    sharded = next((name for name, module in model.named_modules() if is_sharded(module)), None)
    if sharded is not None:
        raise PlanError(
            f"module {sharded or type(model).__name__!r} is sharded already; call rematerialize_blocks before fully_shard."
        )
