"""A program with kernels is the captured one: proven for what fusion makes, refuted for every way to get it wrong."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from benchmarks.models import MODELS
from lowtide.capture import capture
from lowtide.fusion import Kernel, rewrite, split_norms
from lowtide.fusion.proof import check_same
from lowtide.ir.graph import UPDATE_TARGET
from lowtide.program import Program
from lowtide.program.program import Call, Ref


class _Net(nn.Module):
    """Kernels, calls, two buffers that are written, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(4))
        self.seen: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.convolution(x))
        self.seen += h.detach().mean((0, 2, 3))
        left = self.dropout(torch.tanh(h) * 2 + 1)
        right = self.dropout(torch.sigmoid(h * 3) - self.seen.view(1, -1, 1, 1))
        return (left - right).square().mean()


def _pair() -> tuple[Program, Program]:
    program = capture(_Net(), (torch.randn(2, 3, 6, 6),), rewrite=split_norms).program
    fused = rewrite(program)
    assert any(isinstance(call.target, Kernel) for call in fused.calls)
    return program, fused


def test_a_fused_program_is_the_captured_one() -> None:
    check_same(*_pair())


@pytest.mark.parametrize(
    "name", [name if name in ("gpt2", "unet2d") else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_architectures(name: str) -> None:
    model, args, kwargs = MODELS[name]()
    program = capture(model, args, kwargs, rewrite=split_norms).program
    check_same(program, rewrite(program))


def _replaced(fused: Program, op: int, call: Call) -> Program:
    calls = list(fused.calls)
    calls[op] = call
    return dataclasses.replace(fused, calls=tuple(calls))


def _other_operand(fused: Program) -> Iterator[Program]:
    """Another tensor of the same layout in the place of every tensor argument of every call."""
    for op, call in enumerate(fused.calls):
        for place, argument in enumerate(call.args):
            if not isinstance(argument, Ref):
                continue
            earlier = {v for other in fused.graph.ops[:op] for v in other.outputs} | set(fused.graph.inputs)
            wanted = fused.metas[argument.value]
            other = next((v for v in sorted(earlier) if v != argument.value and fused.metas[v] == wanted), None)
            if other is not None:
                args = (*call.args[:place], Ref(other), *call.args[place + 1 :])
                yield _replaced(fused, op, dataclasses.replace(call, args=args))


def _other_number(fused: Program) -> Iterator[Program]:
    """Another constant inside every kernel that has one."""
    for op, call in enumerate(fused.calls):
        if not isinstance(call.target, Kernel):
            continue
        for place, line in enumerate(call.target.body.lines):
            args = tuple(a + 1 if isinstance(a, float) else a for a in line.call.args)
            if args != line.call.args:
                lines = list(call.target.body.lines)
                lines[place] = dataclasses.replace(line, call=dataclasses.replace(line.call, args=args))
                body = dataclasses.replace(call.target.body, lines=tuple(lines))
                yield _replaced(fused, op, dataclasses.replace(call, target=Kernel(body)))


def _other_result(fused: Program) -> Iterator[Program]:
    """The results of every kernel and call that has several, in another order."""
    for op, call in enumerate(fused.calls):
        if isinstance(call.target, Kernel) and len(call.target.body.results) > 1:
            body = dataclasses.replace(call.target.body, results=call.target.body.results[::-1])
            yield _replaced(fused, op, dataclasses.replace(call, target=Kernel(body)))


def _gradients_exchanged(fused: Program) -> Iterator[Program]:
    (first, a), (second, b), *rest = fused.gradients
    yield dataclasses.replace(fused, gradients=((first, b), (second, a), *rest))


def _turns_exchanged(fused: Program) -> Iterator[Program]:
    """The two random operators draw in the other order."""
    first, second = (op.id for op in fused.graph.ops if op.random)
    order = list(range(len(fused.calls)))
    order[first], order[second] = second, first
    ops, calls = (tuple(column[i] for i in order) for column in (fused.graph.ops, fused.calls))
    yield dataclasses.replace(fused, graph=dataclasses.replace(fused.graph, ops=ops), calls=calls)


def _update_lost(fused: Program) -> Iterator[Program]:
    kept = [op.id for op in fused.graph.ops if op.target != UPDATE_TARGET]
    ops, calls = (tuple(column[i] for i in kept) for column in (fused.graph.ops, fused.calls))
    yield dataclasses.replace(fused, graph=dataclasses.replace(fused.graph, ops=ops), calls=calls)


@pytest.mark.parametrize(
    "spoil", [_other_operand, _other_number, _other_result, _gradients_exchanged, _turns_exchanged, _update_lost]
)
def test_mistakes_are_found(spoil: Callable[[Program], Iterator[Program]]) -> None:
    program, fused = _pair()
    count = 0
    for wrong in spoil(fused):
        count += 1
        with pytest.raises(lowtide.CompiledMismatchError, match="no longer computes"):
            check_same(program, wrong)
    assert count


def test_mistakes_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error from ``rematerialize``, before anything runs; the model is as it was."""
    rewriting: Any = importlib.import_module("lowtide.fusion.rewrite")
    original = rewriting._Rewrite.run

    def wrong(self: Any) -> Program:
        return next(_gradients_exchanged(original(self)))

    monkeypatch.setattr(rewriting._Rewrite, "run", wrong)
    model, x = _Net(), torch.randn(2, 3, 6, 6)
    with pytest.raises(lowtide.CompiledMismatchError, match=r"the gradient of norm\.weight"):
        lowtide.rematerialize(model, (x,), budget="100%", compiler="inductor")
    model(x).backward()
