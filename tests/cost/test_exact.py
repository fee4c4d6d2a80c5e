"""Measured costs make the simulator exact: every step of a program takes the bytes that were predicted, to the byte."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from lowtide.capture import capture
from lowtide.cost import CostCache, measure_costs
from lowtide.cost.signature import target_name
from lowtide.cost.synthetic import synthetic_tensor
from lowtide.ir import Compute, Costs, Free, keep_all_schedule, simulate
from lowtide.ir.graph import TANGENT_TARGET
from lowtide.memory import cpu_allocator
from lowtide.memory.meter import collect_garbage
from lowtide.program import Program
from lowtide.program.overwrites import written_form
from lowtide.program.program import Ref
from lowtide.program.references import map_references


class _Loss(nn.Module):
    """A scalar result: its gradient may arrive in any layout, so what views it is planned as a copy of one number."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.model(inputs).square().sum()


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(8, 16, 2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(16, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(inputs)[0])


class _Writing(nn.Module):
    """Writes into views of all kinds: a column, a row, every other element, a diagonal, a piece of a larger storage."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(inputs)
        shifted = hidden.new_zeros(hidden.shape)
        shifted[:, 1:] = hidden[:, :-1].clone()
        shifted[:, 0] = hidden[:, -1]
        shifted[2] = hidden[1].exp()
        shifted[:, ::2].mul_(hidden[:, ::2])
        shifted.diagonal().copy_(hidden.diagonal())
        piece = (hidden * 3)[3:7, 2:8]
        piece[:, 1] = hidden[0, :4]
        return self.layer(shifted) + piece.sum()


def _convolutional() -> nn.Module:
    block = [
        nn.Conv2d(3, 8, 3, stride=2),
        nn.BatchNorm2d(8),
        nn.GELU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.LazyLinear(4),
    ]
    model = nn.Sequential(*block)
    model(torch.randn(2, 3, 16, 16))
    return model


CASES = {
    "convolutional": lambda: (_convolutional(), torch.randn(5, 3, 16, 16)),
    "double": lambda: (_convolutional().double(), torch.randn(5, 3, 16, 16, dtype=torch.float64)),
    "half": lambda: (
        nn.Sequential(nn.Linear(9, 7), nn.LayerNorm(7)).bfloat16(),
        torch.randn(4, 9, dtype=torch.bfloat16),
    ),
    "transformer": lambda: (nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), torch.randn(3, 10, 16)),
    "writing": lambda: (_Writing(), torch.randn(9, 12)),
    "recurrent": lambda: (_Recurrent(), torch.randn(4, 6, 8)),
}


@pytest.mark.parametrize("case", CASES)
def test_every_step_takes_the_predicted_bytes(case: str) -> None:
    torch.manual_seed(0)
    model, inputs = CASES[case]()
    program = capture(_Loss(model), (inputs,)).program
    costs = measure_costs(program, cache=CostCache(None))
    with _nothing_else():
        differences = _run(program, costs)
    slack = inputs.dtype.itemsize
    assert [difference for difference in differences if not -slack <= difference[0] <= 0] == []


@contextmanager
def _nothing_else() -> Iterator[None]:
    """Nothing of earlier tests is freed meanwhile."""
    collect_garbage()
    gc.disable()
    try:
        with torch.no_grad():
            yield
    finally:
        gc.enable()


def _run(program: Program, costs: Costs) -> list[tuple[int, str]]:
    """(measured less predicted, op) of every step where they differ, in a run that keeps everything."""
    counter = cpu_allocator.install()
    assert counter is not None
    schedule = keep_all_schedule(program.graph)
    predicted = simulate(program.graph, costs, schedule).timeline
    values: dict[int, Any] = {v: synthetic_tensor(program.metas[v]) for v in program.graph.inputs}
    start = counter.level_bytes
    differences = []
    for index, step in enumerate(schedule.steps):
        counter.reset_peak()
        if isinstance(step, Compute):
            _compute(program, step, values)
            measured = counter.peak_bytes - start
            if measured != predicted[index]:
                differences.append((measured - int(predicted[index]), program.graph.ops[step.op].name))
        elif isinstance(step, Free):
            for value in program.graph.storages[step.storage].values:
                values.pop(value, None)
    return differences


def _compute(program: Program, step: Compute, values: dict[int, Any]) -> None:
    op = program.graph.ops[step.op]
    if op.target == TANGENT_TARGET:
        meta = program.metas[op.outputs[0]]
        values[op.outputs[0]] = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype)
        return
    call = program.calls[op.id]
    if step.into is not None:
        value = next(v for v in op.inputs if program.graph.values[v].storage == step.into)
        form = written_form(program, op.id, value)
        assert form is not None
        into = {form.keyword: Ref(value)} if form.keyword else {}
        call = dataclasses.replace(call, target=form.target, kwargs={**call.kwargs, **into})
    args, kwargs = map_references((call.args, call.kwargs), lambda ref: values[ref.value])
    with torch.set_grad_enabled("mkldnn_rnn" in target_name(call.target)):
        result = call.target(*args, **kwargs)
    outputs = (result,) if call.positions is None else [result[position] for position in call.positions]
    values.update(zip(op.outputs, outputs, strict=False))
