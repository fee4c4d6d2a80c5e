"""Plans of parts are taken over by parts that are the same, and by no others."""

from __future__ import annotations

import dataclasses

import torch

from lowtide.capture import capture
from lowtide.ir import Compute, check
from lowtide.pipeline import program_costs
from lowtide.program.program import Program
from lowtide.runtime.parts.room import FirstPlans
from lowtide.settings import Settings
from lowtide.sharing import Member
from tests.support.networks import perceptron


def _without_overwrites(program: Program) -> Program:
    """As where gradients arrive in another layout: no operator can write over what it reads."""
    ops = tuple(dataclasses.replace(op, overwrites=()) for op in program.graph.ops)
    return dataclasses.replace(program, graph=dataclasses.replace(program.graph, ops=ops))


def test_a_plan_that_writes_over_tensors_is_for_programs_that_can() -> None:
    program = capture(perceptron(2), (torch.randn(8, 32),)).program
    other = _without_overwrites(program)
    plans, room = FirstPlans(Settings(budget="100%")), 1 << 20
    plan = plans.plan(Member(program, program_costs(program)), room, 1.0)
    assert any(isinstance(step, Compute) and step.into is not None for step in plan.schedule.steps)
    check(other.graph, plans.plan(Member(other, program_costs(other)), room, 1.0).schedule)
