"""A fused kernel: the operators that it stands for, and, once compiled, the code that computes them in one go.

Kernels with the same operators on the same layouts are one kernel, compiled once per process (and kept on disk by
Inductor's own cache). Each is compared with the operators that it stands for before it is used: one that disagrees is
refused, and the log says so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lowtide.capture.program import Call, Program, Ref, TensorMeta
from lowtide.cost.signature import map_refs, target_name
from lowtide.cost.synthetic import synthetic_tensor
from lowtide.errors import CompiledMismatchError, PlanError
from lowtide.store import content_key

_LOG = logging.getLogger(__name__)
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
Code = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
_CHECKS: list[None] = []  # one per open ``checked()``, of all threads: a backward pass may run in another


@contextlib.contextmanager
def checked() -> Iterator[None]:
    """Inside, every kernel runs beside its operators on the program's own tensors: ``CompiledMismatchError`` where they
    disagree. Takes time and memory beyond the plan."""
    _CHECKS.append(None)
    try:
        yield
    finally:
        _CHECKS.pop()


def checking() -> bool:
    """Whether a ``checked()`` is open."""
    return bool(_CHECKS)


@dataclass(frozen=True, slots=True)
class Compiled:
    """``overwrites``: the result takes the memory of the first input."""

    code: Code
    overwrites: bool


_COPYING: set[str] = set()  # digests of kernels that were given tensors in another layout: said once
_COMPILED: dict[tuple[str, int], Compiled | None] = {}  # by digest and number of threads


@dataclass(frozen=True, slots=True)
class Line:
    """One operator of a kernel: ``Ref`` numbers are local, ``outputs`` the numbers that it defines."""

    call: Call
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Body:
    """What a kernel computes: inputs are numbered from 0, then each line's outputs; ``results`` are returned.

    ``donated``: nothing reads the first input afterwards, and the one result may take its memory.
    """

    inputs: tuple[TensorMeta, ...]
    lines: tuple[Line, ...]
    results: tuple[int, ...]
    metas: tuple[TensorMeta, ...]  # of the results
    donated: bool = False

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Operator by operator, as plain PyTorch would."""
        known = dict(enumerate(tensors))
        for line in self.lines:
            args, kwargs = map_refs(line.call, lambda ref: known[ref.value])
            result = line.call.target(*args, **kwargs)
            pieces = [result] if line.call.positions is None else [result[i] for i in line.call.positions]
            known.update(zip(line.outputs, pieces, strict=True))
        return tuple(known[number] for number in self.results)

    @property
    def strides(self) -> list[tuple[int, ...]]:
        """Of the results."""
        return [meta.stride for meta in self.metas]

    def __str__(self) -> str:
        heads = [_layout(i, meta) for i, meta in enumerate(self.inputs)]
        lines = [f"{line.outputs} = {target_name(line.call.target)}{_text(line.call)}" for line in self.lines]
        results = [_layout(number, meta) for number, meta in zip(self.results, self.metas, strict=True)]
        return "\n".join([*heads, *lines, "return over %0" if self.donated else "return", *results])


class Kernel:
    """Callable as ``kernel(*tensors)``: one tensor, or a tuple where the body has several results.

    ``overwrites`` is the position of the argument that the result is written over, ``None`` where it is new memory.
    """

    def __init__(self, body: Body) -> None:
        self.body = body
        self.digest = content_key(str(body))[:16]
        self.__name__ = f"fused_{self.digest[:6]}"
        self.__qualname__ = f"fused_{self.digest}"  # what costs are kept under
        self.code: Code | None = None
        self.overwrites: int | None = None

    def __call__(self, *tensors: torch.Tensor) -> Any:
        assert self.code is not None, "compile_kernels comes first"
        if any(map(_is_laid_out_otherwise, tensors, self.body.inputs)):
            tensors = tuple(self._laid_out(tensors))
        expected = self.body(*tensors) if checking() else None
        results = self.code(list(tensors))
        if expected is not None:
            self._compare(expected, results)
        return results[0] if len(results) == 1 else tuple(results)

    def _laid_out(self, tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        """The tensors as the kernel was compiled for them: it would take each element from the wrong place."""
        for tensor, meta in zip(tensors, self.body.inputs, strict=True):
            if not _is_laid_out_otherwise(tensor, meta):
                yield tensor
                continue
            if self.digest not in _COPYING:
                _COPYING.add(self.digest)
                _LOG.warning(
                    "a kernel of %s is given a tensor with strides %s where %s were captured: it is copied, which takes memory "
                    "beyond the plan. Please report it",
                    ", ".join(self.operators), tensor.stride(), meta.stride,
                )  # fmt: skip
            yield torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=meta.device).copy_(tensor)

    @functools.cached_property
    def keeping(self) -> Callable[..., Any]:
        """The same results in new memory. Compiles a kernel of its own where this one overwrites an argument."""
        if self.overwrites is None:
            return self
        other = Kernel(dataclasses.replace(self.body, donated=False))
        return self._operator_by_operator if _compile([other]) else other

    def _operator_by_operator(self, *tensors: torch.Tensor) -> torch.Tensor:
        (result,) = self.body(*tensors)
        return result

    def _compare(self, expected: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
        complaint = compare(expected, results, self.body.strides)
        if complaint:
            raise CompiledMismatchError(
                f"a kernel of {', '.join(self.operators)} {complaint}: its operators, run on the same tensors, give "
                'something else. Please report it; compiler="eager" runs the operators.',
                operators=self.operators,
            )

    @property
    def operators(self) -> tuple[str, ...]:
        """Names of the operators, each once."""
        return tuple(dict.fromkeys(target_name(line.call.target) for line in self.body.lines))

    @property
    def key(self) -> tuple[str, int]:
        """What its code depends on."""
        return self.digest, torch.get_num_threads()


def compile_kernels(program: Program, on_progress: Callable[[str, float], None] | None = None) -> frozenset[str]:
    """Compile every kernel of ``program``; the digests of those that cannot be used, which the log names."""
    return _compile([call.target for call in program.calls if isinstance(call.target, Kernel)], on_progress)


def _compile(kernels: Sequence[Kernel], on_progress: Callable[[str, float], None] | None = None) -> frozenset[str]:
    report = on_progress or (lambda text, fraction: None)
    missing = {kernel.key: kernel for kernel in kernels if kernel.key not in _COMPILED}
    compilations = [_compilation(kernel) for kernel in missing.values()]
    for text in ("writing kernels", "compiling kernels"):
        for count, compilation in enumerate(compilations):
            report(text, count / len(compilations))
            next(compilation, None)
    for kernel in kernels:
        compiled = _COMPILED[kernel.key]
        if compiled is not None:
            kernel.code, kernel.overwrites = compiled.code, 0 if compiled.overwrites else None
    return frozenset(kernel.digest for kernel in kernels if kernel.code is None)


def _compilation(kernel: Kernel) -> Iterator[None]:
    """Starts the compiler, and when it goes on waits for it: the code, where it does what the operators do, is kept."""
    from lowtide.fusion.inductor import start_body

    try:
        finish = start_body(kernel.body)
        yield
        code = finish()
    except Exception as error:
        if type(getattr(error, "inner_exception", error)).__name__ == "InvalidCxxCompiler":
            raise PlanError(
                'compiler="inductor" needs a C++ compiler for kernels on the CPU, and none was found: install g++ or '
                'clang++, point CXX at one, or use compiler="eager".'
            ) from error
        complaint, compiled = f"cannot be compiled: {type(error).__name__}: {_first_line(error)}", None
    else:
        complaint, compiled = _tried(kernel.body, code)
    if complaint:
        _LOG.warning("a kernel of %s %s; these operators run one by one", ", ".join(kernel.operators), complaint)
    _COMPILED[kernel.key] = compiled


def _tried(body: Body, code: Code) -> tuple[str, Compiled | None]:
    """How compiled results differ from the operators' on random inputs; or nothing, and the code with what it overwrites."""
    tensors = [synthetic_tensor(meta) for meta in body.inputs]
    try:
        with torch.no_grad():
            expected = body(*tensors)
            found = code(list(tensors))
    except RuntimeError as error:
        return f"cannot be tried: {_first_line(error)}", None
    inputs = [tensor.untyped_storage()._cdata for tensor in tensors]
    storages = [result.untyped_storage()._cdata for result in found]
    overwrites = body.donated and storages == inputs[:1]
    shared = len(set(storages)) < len(storages) or (not overwrites and set(inputs).intersection(storages))
    complaint = "returns results that share memory" if shared else compare(expected, found, body.strides)
    return complaint, None if complaint else Compiled(code, overwrites)


def _is_laid_out_otherwise(tensor: torch.Tensor, meta: TensorMeta) -> bool:
    have, want = tensor.stride(), meta.stride
    return have != want and any(
        size > 1 and one != other for size, one, other in zip(meta.shape, have, want, strict=True)
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def compare(expected: Sequence[torch.Tensor], found: Sequence[torch.Tensor], strides: Sequence[tuple[int, ...]]) -> str:
    """What is wrong with the results ``found``; empty where nothing is."""
    for index, (want, have, stride) in enumerate(zip(expected, found, strides, strict=True)):
        if have.dtype != want.dtype or have.shape != want.shape or have.stride() != stride:
            return f"returns result {index} in another layout"
        error = _relative_error(want, have)
        if not error <= _TOLERANCE.get(want.dtype, 0.0):
            return f"returns result {index} with a relative error of {error:.1e}"
    return ""


def _relative_error(want: torch.Tensor, have: torch.Tensor) -> float:
    """The largest difference over the largest finite magnitude; infinities and NaN must be in the same places."""
    if not want.is_floating_point() or not want.numel():
        return 0.0 if torch.equal(want, have) else float("inf")
    finite = want.isfinite()
    if not torch.equal(finite, have.isfinite()):
        return float("inf")
    scale = float(want[finite].abs().max()) if finite.any() else 0.0
    worst = float((want[finite].double() - have[finite].double()).abs().max()) if finite.any() else 0.0
    return worst / scale if scale else worst


def _layout(number: int, meta: TensorMeta) -> str:
    return f"%{number}: {meta.dtype}{meta.shape}{meta.stride}+{meta.storage_offset % 16}@{meta.device}"


def _text(call: Call) -> str:
    return f"{_written(call.args)}{_written(tuple(sorted(call.kwargs.items())))}->{call.positions}"


def _written(argument: Any) -> str:
    if isinstance(argument, Ref):
        return f"%{argument.value}"
    if isinstance(argument, (list, tuple)):
        return "[" + ",".join(map(_written, argument)) + "]"
    return repr(argument)
