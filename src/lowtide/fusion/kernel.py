"""A fused kernel: the operators that it replaces, and, once compiled, code that computes them at once.

Kernels with the same operators on the same layouts are one kernel, compiled once per process (and cached on disk by
Inductor). Each is compared with its operators before use; if results differ, it is refused, and the log says so.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from lowtide.cost.synthetic import synthetic_tensor
from lowtide.errors import PlanError
from lowtide.fusion import inductor
from lowtide.fusion.body import Body, Code
from lowtide.fusion.comparison import checking, compare, require_same
from lowtide.program import layouts
from lowtide.program.program import Program, TensorMeta
from lowtide.store import content_key

_LOG = logging.getLogger(__name__)
_COPYING: set[str] = set()  # digests of kernels called with another layout, to warn once
# By digest and number of threads: code and position of the overwritten argument; ``None`` if unusable.
_COMPILED: dict[tuple[str, int], tuple[Code, int | None] | None] = {}


class Kernel:
    """Callable as ``kernel(*tensors)``. Returns one tensor, or a tuple if the body has several results.

    ``overwrites``: the position of the argument whose memory the result takes, ``None`` if it is new memory.
    """

    def __init__(self, body: Body) -> None:
        self.body = body
        self.digest = content_key(str(body))[:16]
        self.__name__ = f"fused_{self.digest[:6]}"
        self.__qualname__ = f"fused_{self.digest}"  # key of its cached costs
        self.code: Code | None = None
        self.overwrites: int | None = None

    def __call__(self, *tensors: torch.Tensor) -> Any:
        assert self.code is not None, "compile_kernels comes first"
        if not all(map(_has_layout, tensors, self.body.inputs)):
            tensors = tuple(map(self._laid_out, tensors, self.body.inputs))
        expected = self.body(*tensors) if checking() else None
        results = self.code(list(tensors))
        if expected is not None:
            require_same("a kernel", self.body.operators, expected, results, self.body.strides)
        return results[0] if len(results) == 1 else tuple(results)

    def _laid_out(self, tensor: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
        """The tensor in the layout that the kernel was compiled for; with another one it would read wrong elements."""
        if _has_layout(tensor, meta):
            return tensor
        if self.digest not in _COPYING:
            _COPYING.add(self.digest)
            _LOG.warning(
                "a kernel of %s is given a tensor with strides %s where %s were captured: it is copied, which takes memory "
                "beyond the plan. Please report it",
                ", ".join(self.body.operators), tensor.stride(), meta.stride,
            )  # fmt: skip
        return layouts.empty(meta).copy_(tensor)

    @functools.cached_property
    def keeping(self) -> Callable[..., Any]:
        """A form of the kernel that returns the same bits in new memory, so that results do not depend on which form a
        schedule uses. Compiles another kernel if this one overwrites an argument."""
        if self.overwrites is None:
            return self
        other = Kernel(dataclasses.replace(self.body, donated=False))
        return self._on_a_copy if _compile([other]) or not self._agrees(other) else other

    def _agrees(self, other: Kernel) -> bool:
        """Whether ``other`` computes the same bits on random inputs."""
        tensors = [synthetic_tensor(meta) for meta in self.body.inputs]
        with torch.no_grad():
            return torch.equal(other(*tensors), self(*tensors))

    def _on_a_copy(self, *tensors: torch.Tensor) -> Any:
        """Overwrite a copy of the argument, which becomes the result."""
        assert self.overwrites is not None
        given = list(tensors)
        given[self.overwrites] = layouts.empty(self.body.inputs[self.overwrites]).copy_(given[self.overwrites])
        return self(*given)

    @property
    def key(self) -> tuple[str, int]:
        """What the compiled code depends on."""
        return self.digest, torch.get_num_threads()


def compile_kernels(program: Program) -> frozenset[str]:
    """Compile every kernel of ``program``. Returns the digests of unusable ones, which are logged."""
    return _compile([call.target for call in program.calls if isinstance(call.target, Kernel)])


def _compile(kernels: Sequence[Kernel]) -> frozenset[str]:
    missing = {kernel.key: kernel for kernel in kernels if kernel.key not in _COMPILED}
    compilations = [_compilation(kernel) for kernel in missing.values()]
    for _ in ("start", "finish"):
        for compilation in compilations:
            next(compilation, None)
    for kernel in kernels:
        kernel.code, kernel.overwrites = _COMPILED[kernel.key] or (None, None)
    return frozenset(kernel.digest for kernel in kernels if kernel.code is None)


def _compilation(kernel: Kernel) -> Iterator[None]:
    """Start the compiler; when resumed, wait for it. The code is kept if it agrees with the operators."""
    try:
        finish = inductor.start_body(kernel.body)
        yield
        code = finish()
    except Exception as error:
        if type(getattr(error, "inner_exception", error)).__name__ == "InvalidCxxCompiler":
            raise PlanError(
                'compiler="inductor" needs a C++ compiler for kernels on the CPU, and none was found: install g++ or '
                'clang++, point CXX at one, or use compiler="eager".'
            ) from error
        complaint, overwrites = f"cannot be compiled: {type(error).__name__}: {_first_line(error)}", None
    else:
        complaint, overwrites = _tried(kernel.body, code)
    if complaint:
        _LOG.warning("a kernel of %s %s; these operators run one by one", ", ".join(kernel.body.operators), complaint)
    _COMPILED[kernel.key] = None if complaint else (code, overwrites)


def _tried(body: Body, code: Code) -> tuple[str, int | None]:
    """How compiled results differ from the operators' on random inputs (empty if not), and the position of the
    overwritten argument."""
    tensors = [synthetic_tensor(meta) for meta in body.inputs]
    try:
        with torch.no_grad():
            expected = body(*tensors)
            found = code(list(tensors))
    except RuntimeError as error:
        return f"cannot be tried: {_first_line(error)}", None
    inputs = [tensor.untyped_storage()._cdata for tensor in tensors]
    storages = [result.untyped_storage()._cdata for result in found]
    overwrites = 0 if body.donated and storages == inputs[:1] else None
    if len({*storages}) < len(storages) or (overwrites is None and {*inputs}.intersection(storages)):
        return "returns results that share memory", None
    return compare(expected, found, body.strides), overwrites


def _has_layout(tensor: torch.Tensor, meta: TensorMeta) -> bool:
    strides = tensor.stride()
    return strides == meta.stride or layouts.is_equivalent(meta.shape, strides, meta.stride)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
