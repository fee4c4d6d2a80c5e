"""A kernel computes what its operators compute, and one that does not is refused."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.capture import capture
from lowtide.fusion import Kernel, checked, fuse, inductor, kernel, rewrite
from lowtide.fusion.body import Body, Code
from lowtide.ir import Compute, Op, keep_all_schedule, simulate
from lowtide.lower import lower
from lowtide.program import Program
from tests.support.overwriting import without_overwriting


class _Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.linear(x).chunk(2, dim=-1)
        return (torch.softmax(a * 2, -1) * torch.sigmoid(b)).square().sum()


def _kernels() -> list[Kernel]:
    program = rewrite(capture(_Gate(), (torch.randn(10, 6),)).program)
    assert not kernel.compile_kernels(program)
    return [call.target for call in program.calls if isinstance(call.target, Kernel)]


def test_compiled_kernels_are_close_to_their_operators() -> None:
    for found in _kernels():
        inputs = [torch.randn(m.shape).as_strided(m.shape, m.stride) for m in found.body.inputs]
        results = found(*inputs)
        results = results if isinstance(results, tuple) else (results,)
        for want, have, meta in zip(found.body(*inputs), results, found.body.metas, strict=True):
            torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-6)
            assert have.stride() == meta.stride


def test_tensors_in_another_layout_are_copied(caplog: pytest.LogCaptureFixture) -> None:
    """Compiled code takes elements from fixed places."""
    for found in _kernels():
        inputs = [torch.randn(m.shape).as_strided(m.shape, m.stride) for m in found.body.inputs]
        others = [x.movedim(0, -1).contiguous().movedim(-1, 0) if x.dim() > 1 else x.clone() for x in inputs]
        assert any(x.stride() != other.stride() for x, other in zip(inputs, others, strict=True))
        with caplog.at_level(logging.WARNING, logger="lowtide"):
            results, expected = found(*others), found.body(*inputs)
        for want, have in zip(expected, results if isinstance(results, tuple) else (results,), strict=True):
            torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-6)
        assert "is copied" in caplog.text


def test_wrong_kernels_are_refused(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Code that is off by a thousandth does not run: its operators do, one by one, and the log says so."""

    def wrong(body: Body) -> Callable[[], Code]:
        def code(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
            return [result * 1.001 for result in body(*tensors)]

        return lambda: code

    _assert_not_fused(wrong, monkeypatch, caplog)
    assert "relative error of 1.0e-03" in caplog.text


def _assert_not_fused(start: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """With kernels that ``start`` begins to compile."""
    monkeypatch.setattr(inductor, "start_body", start)
    monkeypatch.setattr(kernel, "_COMPILED", {})
    with caplog.at_level(logging.WARNING, logger="lowtide"):
        program = fuse(capture(_Gate(), (torch.randn(10, 6),)).program)
    assert not any(isinstance(call.target, Kernel) for call in program.calls)


def test_kernels_that_do_not_compile_are_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(body: Body) -> Callable[[], Code]:
        raise RuntimeError("no compiler found")

    _assert_not_fused(failing, monkeypatch, caplog)
    assert "no compiler found" in caplog.text


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be compiled: one error that says what to install, not a warning for every kernel."""
    from torch._inductor.exc import InductorError, InvalidCxxCompiler

    def failing(body: Body) -> Callable[[], Code]:
        raise InductorError(InvalidCxxCompiler(), None)

    monkeypatch.setattr(inductor, "start_body", failing)
    monkeypatch.setattr(kernel, "_COMPILED", {})
    with pytest.raises(lowtide.PlanError, match=r"install g\+\+"):
        lowtide.rematerialize(_Gate(), (torch.randn(10, 6),), budget="100%", compiler="inductor")


def test_kernels_are_compiled_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel is with the compiler before any is waited for; what was not finished is compiled another time."""
    original, events = inductor.start_body, list[str]()

    def noting(body: Body) -> Callable[[], Code]:
        finish = original(body)
        events.append("start")

        def noted() -> Code:
            events.append("finish")
            if events.count("finish") == 2:
                raise KeyboardInterrupt
            return finish()

        return noted

    monkeypatch.setattr(inductor, "start_body", noting)
    monkeypatch.setattr(kernel, "_COMPILED", {})
    program = rewrite(capture(_Gate(), (torch.randn(10, 6),)).program)
    count = len({call.target.digest for call in program.calls if isinstance(call.target, Kernel)})
    with pytest.raises(KeyboardInterrupt):
        kernel.compile_kernels(program)
    assert events == ["start"] * count + ["finish"] * 2
    assert not kernel.compile_kernels(program)
    assert events[count + 2 :] == ["start"] * (count - 1) + ["finish"] * (count - 1)


def test_checked_compares_on_the_programs_own_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that is wrong for large numbers only passes the check beforehand, and not the one inside ``checked``."""

    def wrong_for_large(body: Body) -> Callable[[], Code]:
        def code(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
            large = any(tensor.is_floating_point() and bool(tensor.abs().max() > 100) for tensor in tensors)
            return [result * 2 if large else result for result in body(*tensors)]

        return lambda: code

    monkeypatch.setattr(inductor, "start_body", wrong_for_large)
    monkeypatch.setattr(kernel, "_COMPILED", {})
    model, x = _Gate(), torch.randn(10, 6)
    lowtide.rematerialize(model, (x,), budget="100%", planner="keep-all", compiler="inductor")
    with checked():
        model(x).backward()
        with pytest.raises(lowtide.CompiledMismatchError, match=r"relative error of 1.0e\+00") as raised:
            model(1e4 * x)
    assert "aten._softmax.default" in raised.value.operators


class _Feed(nn.Module):
    """What arrives at the activation from behind dies in its kernel."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(torch.tanh(x) * x)
        return x.square().mean()


class _Gated(nn.Module):
    """Two kernels read the gradient of the product; the later one may write over it."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))
        return x.square().mean()


class _Heads(nn.Module):
    """Products of three dimensions that are looked at in four."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = self.layer(x)
            x = (torch.tanh(x.view(-1, 4, x.shape[-1])) * 2 + 1).view(x.shape)
        return x.square().mean()


def _overwriting(program: Program) -> list[Op]:
    return [op for op in program.graph.ops if op.overwrites and isinstance(program.calls[op.id].target, Kernel)]


@pytest.mark.parametrize("make", [_Feed, *(pytest.param(one, marks=pytest.mark.slow) for one in (_Gated, _Heads))])
def test_kernels_write_over_what_dies(make: type[nn.Module]) -> None:
    program = fuse(capture(make(), (torch.randn(512, 256),)).program)
    ops = _overwriting(program)
    assert len(ops) >= 3
    for op in ops:
        target = program.calls[op.id].target
        assert isinstance(target, Kernel)
        tensors = [torch.randn(m.shape).as_strided(m.shape, m.stride) for m in target.body.inputs]
        kept = [tensor.clone() for tensor in tensors]
        result = target.keeping(*tensors)
        assert all(map(torch.equal, tensors, kept))
        assert result.data_ptr() != tensors[0].data_ptr()
        assert target(*tensors).data_ptr() == tensors[0].data_ptr()
        assert torch.equal(tensors[0].view_as(result), result)
        assert all(map(torch.equal, tensors[1:], kept[1:]))


@pytest.mark.parametrize(
    ("make", "budget"),
    [
        (_Feed, "60%"),
        (_Feed, "100%"),
        (_Gated, "85%"),
        (_Heads, "100%"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((_Gated, "100%"), (_Heads, "85%"))),
    ],
)
def test_steps_with_overwriting_kernels(make: type[nn.Module], budget: str) -> None:
    """The peak is the predicted one, gradients are eager's. Where all is kept, which no measured time decides, there are fewer
    bytes than new memory for every result takes."""
    model, x = make(), torch.randn(512, 256)
    model(x).backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    lowtide.rematerialize(model, (x,), budget=budget, planner="auto{effort=1}", compiler="inductor")
    (plan,) = lowtide.plans(model)
    into = [step for step in plan.schedule.steps if isinstance(step, Compute) and step.into is not None]
    plain = without_overwriting(plan.schedule)
    with_reuse, without = (simulate(plan.graph, plan.costs, each).timeline for each in (plan.schedule, plain))
    assert (with_reuse <= without).all()
    if budget == "100%":
        assert any(plan.graph.ops[step.op].target.startswith("lowtide.fused") for step in into)
        assert (with_reuse < without).any()
    for checks in (contextlib.nullcontext(), checked()):
        model.zero_grad()
        with checks:
            model(x).backward()
        for want, have in zip(expected, (p.grad for p in model.parameters()), strict=True):
            torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-7)
    model.zero_grad()
    assert lowtide.measure(lambda: model(x).backward()).peak_bytes == plan.peak_bytes


def test_forms_that_compute_otherwise_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results do not depend on which form a schedule takes, so a plan may change between two steps."""
    program = fuse(capture(_Feed(), (torch.randn(512, 256),)).program)
    target = program.calls[_overwriting(program)[0].id].target
    assert isinstance(target, Kernel)
    tensors = [torch.randn(m.shape).as_strided(m.shape, m.stride) for m in target.body.inputs]
    compiled = target.keeping
    expected, kept = compiled(*tensors), [tensor.clone() for tensor in tensors]
    call = Kernel.__call__
    monkeypatch.setattr(Kernel, "__call__", lambda self, *given: call(self, *given) + (0 if self is target else 1e-7))
    del target.keeping
    assert not torch.equal(compiled(*tensors), expected)
    assert torch.equal(target.keeping(*tensors), expected)
    assert all(map(torch.equal, tensors, kept))
    del target.keeping


def test_a_schedule_without_overwriting_keeps_the_arguments() -> None:
    """A kernel that overwrites has another form for a schedule in which its argument lives on."""
    program = fuse(capture(_Feed(), (torch.randn(512, 256),)).program)
    schedule = keep_all_schedule(program.graph)
    plain = without_overwriting(schedule)
    names = {f"{call.target.__name__}_" for call in program.calls if getattr(call.target, "overwrites", None) == 0}
    written = lower(program, schedule).source
    assert not any(
        "keeping" in vars(program.calls[op.id].target) for op in _overwriting(program)
    )  # nothing asks for it
    kept = lower(program, plain).source
    assert all(name in written for name in names)
    assert not any(name in kept for name in names)


def test_kernels_that_read_elsewhere_take_new_memory() -> None:
    """Inductor decides: an element is read again after its place would have been written."""

    class Turned(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x @ x
            return (y + 2 * y.t()) @ x

    program = fuse(capture(Turned(), (torch.randn(32, 32, requires_grad=True),)).program)
    turned = [
        call.target for call in program.calls if isinstance(call.target, Kernel) and "aten.t." in str(call.target.body)
    ]
    assert any(target.body.donated for target in turned)
    assert all(target.overwrites is None for target in turned)


def test_two_threads_do_not_change_inductor_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would put back what the other one had put in its place, for the whole process."""
    from torch._inductor.async_compile import AsyncCompile

    wait, inside, together = AsyncCompile.wait, list[int](), list[int]()

    def tracing(body: Body, fakes: Any) -> Any:
        inside.append(1)
        time.sleep(0.05)
        together.append(len(inside))
        inside.pop()
        raise RuntimeError("traced")

    def compile_one() -> None:
        with contextlib.suppress(RuntimeError):
            inductor.start_body(body)

    monkeypatch.setattr(inductor, "_traced", tracing)
    program = rewrite(capture(_Gate(), (torch.randn(10, 6),)).program)
    body = next(call.target.body for call in program.calls if isinstance(call.target, Kernel))
    threads = [threading.Thread(target=compile_one) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == [1, 1, 1]
    assert AsyncCompile.wait is wait
