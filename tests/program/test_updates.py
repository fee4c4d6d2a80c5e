"""Where updates stand in a program: no schedule that keeps its order reads a parameter afterwards, whatever it recomputes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lowtide.capture import capture
from lowtide.errors import ScheduleError
from lowtide.ir import Graph, check, graph_from_json, graph_to_json, keep_all_schedule, schedule_from_sequence
from lowtide.ir.graph import OPTIMIZER_TARGET
from lowtide.program.program import Program
from lowtide.program.sizes import byte_costs
from lowtide.program.updates import with_updates
from tests.support.networks import WithLoss, perceptron, residual_blocks
from tests.support.sequences import random_sequence


class Reread(nn.Module):
    """Weights that are read early and late, with and without a gradient, and turned."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(F.linear(x, self.three.weight.detach()))
        x = torch.tanh(self.one(x))
        x = torch.relu(self.two(x)) * torch.sigmoid(F.linear(x, self.one.weight.t()))
        return torch.sin(self.three(x))


def _convolutions() -> nn.Module:
    return residual_blocks(lambda: nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU()), 3)


def _norms() -> nn.Module:
    return residual_blocks(lambda: nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.1)), 3)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x
        for _ in range(2):
            state = self.cell(x, state)
        return state


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "perceptron": (lambda: perceptron(4, 8), (4, 8)),
    "norms": (_norms, (4, 8)),
    "convolutions": (_convolutions, (2, 3, 6, 6)),
    "weights read again": (Reread, (4, 8)),
    "recurrent": (Recurrent, (4, 8)),
}


def _program(name: str) -> Program:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    return capture(WithLoss(make()), (torch.randn(shape),), {}).program


def _nothing(*_: Any) -> None:
    """An update."""


def _updated(program: Program, but: int = -1) -> Program:
    return with_updates(program, {position: _nothing for position, _ in program.gradients if position != but})


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("drop", [0.05, 0.3])
def test_no_sequence_reads_a_parameter_after_its_update(name: str, drop: float) -> None:
    plain = _program(name)
    for but in (-1, plain.gradients[0][0]):  # that one's gradient stays to the end
        graph = _updated(plain, but).graph
        check(graph, keep_all_schedule(graph))
        for seed in range(40):
            check(graph, schedule_from_sequence(graph, random_sequence(graph, seed, drop)))


@pytest.mark.parametrize("name", ["perceptron", "norms", "convolutions"])
def test_the_checker_knows_when_a_parameter_is_read_too_late(name: str) -> None:
    """The same sequences are no longer all valid where backward operators may run again."""
    graph = _updated(_program(name)).graph
    again = dataclasses.replace(graph, ops=tuple(dataclasses.replace(op, once=False) for op in graph.ops))
    with pytest.raises(ScheduleError, match="which is updated already"):
        for seed in range(40):
            check(again, schedule_from_sequence(again, random_sequence(again, seed)))


def _places(graph: Graph) -> list[int]:
    return [op.id for op in graph.ops if op.target == OPTIMIZER_TARGET]


@pytest.mark.parametrize("name", MODELS)
def test_updates_come_as_soon_as_they_may(name: str) -> None:
    """Each is there, once, and where layers follow each other half of them before the last fifth of the backward pass."""
    plain = _program(name)
    program = _updated(plain)
    graph = program.graph
    places = _places(graph)
    assert len(places) == len(plain.gradients) == len(program.updated)
    assert not program.gradients
    assert not {value for _, value in plain.gradients} & set(graph.outputs)
    if name in ("perceptron", "norms", "convolutions"):
        backward = len(graph.ops) - graph.forward_ops
        assert places[len(places) // 2] < graph.forward_ops + 0.8 * backward


def test_a_graph_with_updates_has_its_text_and_json_forms() -> None:
    program = _updated(_program("norms"))
    costs = byte_costs(program)
    graph, _ = graph_from_json(graph_to_json(program.graph, costs))
    assert graph == program.graph
    assert any(op.once for op in graph.ops)


def test_what_is_not_asked_for_stays() -> None:
    plain = _program("perceptron")
    assert with_updates(plain, {}) is plain
    position = plain.gradients[0][0]
    program = with_updates(plain, {position: _nothing})
    assert program.updated == (position,)
    assert program.gradients == plain.gradients[1:]
