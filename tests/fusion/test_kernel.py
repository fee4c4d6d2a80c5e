"""A kernel computes what its operators compute, and one that does not is refused."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

import lowtide
from lowtide.capture import capture
from lowtide.fusion import Kernel, checked, fuse, kernel, rewrite


class _Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.linear(x).chunk(2, dim=-1)
        return (torch.softmax(a * 2, -1) * torch.sigmoid(b)).square().sum()


def _kernels() -> list[Kernel]:
    program = rewrite(capture(_Gate(), (torch.randn(10, 6),)))
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


def test_wrong_kernels_are_refused(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Code that is off by a thousandth does not run: its operators do, one by one, and the log says so."""
    from lowtide.fusion import inductor

    def wrong(body: kernel.Body) -> Callable[[], kernel.Code]:
        def code(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
            return [result * 1.001 for result in body(*tensors)]

        return lambda: code

    monkeypatch.setattr(inductor, "start_body", wrong)
    monkeypatch.setattr(kernel, "_COMPILED", {})
    with caplog.at_level(logging.WARNING, logger="lowtide"):
        program = fuse(capture(_Gate(), (torch.randn(10, 6),)))
    assert not any(isinstance(call.target, Kernel) for call in program.calls)
    assert "relative error of 1.0e-03" in caplog.text


def test_kernels_that_do_not_compile_are_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from lowtide.fusion import inductor

    def failing(body: kernel.Body) -> Callable[[], kernel.Code]:
        raise RuntimeError("no compiler found")

    monkeypatch.setattr(inductor, "start_body", failing)
    monkeypatch.setattr(kernel, "_COMPILED", {})
    with caplog.at_level(logging.WARNING, logger="lowtide"):
        program = fuse(capture(_Gate(), (torch.randn(10, 6),)))
    assert not any(isinstance(call.target, Kernel) for call in program.calls)
    assert "no compiler found" in caplog.text


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be compiled: one error that says what to install, not a warning for every kernel."""
    from torch._inductor.exc import InductorError, InvalidCxxCompiler

    from lowtide.fusion import inductor

    def failing(body: kernel.Body) -> Callable[[], kernel.Code]:
        raise InductorError(InvalidCxxCompiler(), None)

    monkeypatch.setattr(inductor, "start_body", failing)
    monkeypatch.setattr(kernel, "_COMPILED", {})
    with pytest.raises(lowtide.PlanError, match=r"install g\+\+"):
        lowtide.rematerialize(_Gate(), (torch.randn(10, 6),), budget="100%", compiler="inductor")


def test_kernels_are_compiled_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel is with the compiler before any is waited for; what was not finished is compiled another time."""
    from lowtide.fusion import inductor

    original, events = inductor.start_body, list[str]()

    def noting(body: kernel.Body) -> Callable[[], kernel.Code]:
        finish = original(body)
        events.append("start")

        def noted() -> kernel.Code:
            events.append("finish")
            if events.count("finish") == 2:
                raise KeyboardInterrupt
            return finish()

        return noted

    monkeypatch.setattr(inductor, "start_body", noting)
    monkeypatch.setattr(kernel, "_COMPILED", {})
    program = rewrite(capture(_Gate(), (torch.randn(10, 6),)))
    count = len({call.target.digest for call in program.calls if isinstance(call.target, Kernel)})
    with pytest.raises(KeyboardInterrupt):
        kernel.compile_kernels(program)
    assert events == ["start"] * count + ["finish"] * 2
    assert not kernel.compile_kernels(program)
    assert events[count + 2 :] == ["start"] * (count - 1) + ["finish"] * (count - 1)


def test_checked_compares_on_the_programs_own_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that is wrong for large numbers only passes the check beforehand, and not the one inside ``checked``."""
    from lowtide.fusion import inductor

    def wrong_for_large(body: kernel.Body) -> Callable[[], kernel.Code]:
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
