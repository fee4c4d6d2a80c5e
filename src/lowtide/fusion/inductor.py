"""The only module that calls Inductor: from a kernel's operators to compiled code.

The operators are traced with Inductor's decompositions and passed to ``compile_fx_inner``, below AOTAutograd: only code
generation happens there. Results have the captured strides. If the first input is donated and Inductor finds it safe,
the result overwrites it. Inductor does this for backward graphs only, so such a kernel is compiled as one.

Most of the time goes to the C++ compiler, or Triton's, in separate processes. All kernels are submitted before any is
awaited, so they compile in parallel.

Inductor's cache key does not contain which inputs may be overwritten and which strides results have. So graphs get a
mark: kernels and other code never share cache entries.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from lowtide.capture.trace.patches import wrapped
from lowtide.fusion.body import Body, Code
from lowtide.program import layouts
from lowtide.program.program import TensorMeta

# Size asserts would run at every call; kernels are compared with their operators once instead.
_SETTINGS = {"size_asserts": False, "nan_asserts": False, "alignment_asserts": False, "fallback_random": True}
# Held while Inductor's settings and ``AsyncCompile.wait`` are replaced, which affects the whole process.
_GENERATING = threading.Lock()


def start_body(body: Body) -> Callable[[], Code]:
    """Generate the code of ``body`` and start its compilation in the background.

    Returns a function that waits for it and returns the code: a function that takes the inputs in a list (which it
    empties) and returns the results. Both raise Inductor's errors.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv())  # Inductor's disk cache needs a shape environment
    context = TracingContext(mode)
    if body.donated:
        facts: Any = types.SimpleNamespace(bw_donated_idxs=[0], static_input_indices=[])
        context.fw_metadata = facts
    with _GENERATING, _settings(), _not_waiting() as waits, torch.no_grad():
        with mode:
            fakes = [layouts.empty(meta) for meta in body.inputs]
            module = _traced(body, fakes)
        from torch._inductor import compile_fx

        with tracing(context):
            compiled: Any = compile_fx.compile_fx_inner(module, fakes, is_backward=body.donated)
    code: Code = getattr(compiled, "current_callable", None) or compiled

    def finish() -> Code:
        while waits:
            waits.pop(0)()
        return code

    return finish


def _traced(body: Body, fakes: list[torch.Tensor]) -> fx.GraphModule:
    import torch._inductor.lowering  # noqa: F401  the decomposition table is incomplete before
    from torch._inductor.decomposition import select_decomp_table

    def function(*tensors: torch.Tensor) -> list[torch.Tensor]:
        return [_arranged(result, meta) for result, meta in zip(body(*tensors), body.metas, strict=True)]

    traced = make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="real")(*fakes)
    first, *_, output = traced.graph.nodes
    output.meta["user_visible_output_idxs"] = list(range(len(body.results)))
    # The name of the first node is part of Inductor's cache key.
    first.name = "lowtide_overwritten" if body.donated else "lowtide_kernel"
    if first.op == "placeholder":
        first.target = first.name
    traced.recompile()
    return traced


def _arranged(result: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """``result`` in the captured layout, if a decomposition chose another."""
    if result.stride() == meta.stride:
        return result
    order = layouts.memory_order(meta.shape, meta.stride)
    inverse = [order.index(axis) for axis in range(result.dim())]
    dense: torch.Tensor = torch.ops.aten.clone.default(result.permute(order), memory_format=torch.contiguous_format)
    return dense.permute(inverse)


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    from torch._inductor import config

    # Code depends on the number of threads, which is not in the cache key of all versions.
    with config.patch({**_SETTINGS, "cpp.threads": torch.get_num_threads()}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of torch about itself
        yield


@contextlib.contextmanager
def _not_waiting() -> Iterator[list[Callable[[], None]]]:
    """A context in which this thread loads generated modules without waiting for their kernels. Yields the list of
    waits.

    The last step of loading a module waits and puts compiled kernels in place. Each module makes its own
    ``AsyncCompile``, so the method is replaced for the whole process, by one thread at a time (``_GENERATING``): two
    would restore each other's replacement.
    """
    from torch._inductor.async_compile import AsyncCompile

    waits: list[Callable[[], None]] = []

    def later(wait: Callable[..., None]) -> Callable[..., None]:
        return lambda compiler, scope: waits.append(functools.partial(wait, compiler, scope))

    with wrapped(AsyncCompile, "wait", later):
        yield waits
