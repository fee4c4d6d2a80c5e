"""Inductor's code is kept on disk: a second start writes none, and nobody else's is taken for a kernel's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._dynamo.utils import counters
from torch._guards import TracingContext, tracing
from torch._inductor.utils import fresh_cache
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from lowtide.capture import capture
from lowtide.fusion import Kernel, fuse, inductor, kernel


class _Waves(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = torch.tanh(x @ x) * 1.5 + 0.25
        return x


@pytest.fixture(autouse=True)
def _empty_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the process."""
    monkeypatch.setattr(kernel, "_COMPILED", {})


def _kernels() -> list[Kernel]:
    program = fuse(capture(_Waves(), (torch.randn(48, 48, requires_grad=True),)).program)
    found = {call.target.digest: call.target for call in program.calls if isinstance(call.target, Kernel)}
    return list(found.values())


def _inputs(found: Kernel) -> list[torch.Tensor]:
    return [torch.randn(meta.shape).as_strided(meta.shape, meta.stride) for meta in found.body.inputs]


def _counted(compile: Callable[[], Any]) -> tuple[int, int]:
    """Graphs whose code was on disk while ``compile`` ran, and those whose code was not."""
    counters.clear()
    compile()
    return counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"]


@pytest.fixture(scope="module")
def first() -> Iterator[list[Kernel]]:
    """What is compiled where nothing is on disk yet, nor in the process; from then on its code is."""
    found: list[Kernel] = []
    with fresh_cache(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "_COMPILED", {})
        assert _counted(lambda: found.extend(_kernels())) == (0, len(found))
        yield found


def test_a_second_start_writes_no_code(first: list[Kernel]) -> None:
    second: list[Kernel] = []
    assert _counted(lambda: second.extend(_kernels())) == (len(second), 0)
    assert len(first) > 1
    for one, other in zip(first, second, strict=True):
        assert (one.digest, one.overwrites) == (other.digest, other.overwrites)
        inputs = _inputs(one)
        assert torch.equal(one(*(x.clone() for x in inputs)), other(*inputs))


@pytest.mark.usefixtures("first")
def test_code_for_another_number_of_threads_is_not_taken() -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        hits, misses = _counted(_kernels)
    finally:
        torch.set_num_threads(threads)
    assert hits == 0
    assert misses > 0


@pytest.mark.usefixtures("first")
def test_a_kernel_that_overwrites_is_taken_for_no_other() -> None:
    """Neither for one that keeps, nor for its operators compiled by somebody else, in the same settings, as a backward pass
    that keeps its inputs."""
    over = next(found for found in _kernels() if found.overwrites == 0)
    keeping = over.keeping
    assert isinstance(keeping, Kernel)
    assert not keeping.body.donated
    assert keeping.overwrites is None
    # Loaded here: torch warns of its own then, unless kernels were compiled before.
    from torch._inductor import compile_fx
    from torch._inductor.decomposition import select_decomp_table

    body = dataclasses.replace(over.body, donated=False)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode, torch.no_grad():
        fakes = [torch.empty_strided(meta.shape, meta.stride) for meta in body.inputs]
        trace = make_fx(lambda *tensors: list(body(*tensors)), decomposition_table=select_decomp_table())
        module: fx.GraphModule = trace(*fakes)

    with torch.no_grad(), inductor._settings(), tracing(TracingContext(mode)):
        counters.clear()
        compiled: Any = compile_fx.compile_fx_inner(module, fakes, is_backward=True)
        assert counters["inductor"]["fxgraph_cache_miss"] == 1
    inputs = _inputs(over)
    kept = [x.clone() for x in inputs]
    (result,) = compiled(list(inputs))
    assert all(map(torch.equal, inputs, kept))
    assert result.data_ptr() != inputs[0].data_ptr()
    torch.testing.assert_close(result, over(*inputs))
