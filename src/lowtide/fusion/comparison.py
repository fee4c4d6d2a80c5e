"""Compare compiled code with the operators that it replaces."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from lowtide.errors import CompiledMismatchError

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_CHECKS: list[None] = []  # one per open ``checked()`` of any thread: a backward pass may run in another


@contextlib.contextmanager
def checked() -> Iterator[None]:
    """A context in which every kernel also runs its operators on the program's tensors. Raises
    ``CompiledMismatchError`` if they differ. Takes time and memory beyond the plan."""
    _CHECKS.append(None)
    try:
        yield
    finally:
        _CHECKS.pop()


def checking() -> bool:
    """Whether a ``checked()`` context is open."""
    return bool(_CHECKS)


def require_same(
    code: str, operators: tuple[str, ...], expected: Any, found: Any, strides: Sequence[tuple[int, ...]] = ()
) -> None:
    """Raise ``CompiledMismatchError`` if the results of ``code`` differ from those of the operators that it
    replaces."""
    complaint = compare(expected, found, strides)
    if complaint:
        raise CompiledMismatchError(
            f"{code}, which stands for {', '.join(operators)}, {complaint}: run on the same tensors, PyTorch's operators give "
            'something else. Please report it; compiler="eager" runs the operators.',
            operators=operators,
        )


def compare(expected: Any, found: Any, strides: Sequence[tuple[int, ...]] = ()) -> str:
    """How the tensors ``found`` differ; empty if they do not. They must have ``strides``, or the strides of
    ``expected``."""
    wanted, got = _tensors(expected), _tensors(found)
    strides = strides or [want.stride() for want in wanted]
    for index, (want, have, stride) in enumerate(zip(wanted, got, strides, strict=True)):
        if have.dtype != want.dtype or have.shape != want.shape or have.stride() != stride:
            return f"returns result {index} in another layout"
        error = _relative_error(want, have)
        if not error <= _TOLERANCE.get(want.dtype, 0.0):
            return f"returns result {index} with a relative error of {error:.1e}"
    return ""


def _tensors(results: Any) -> list[torch.Tensor]:
    return [each for each in (results if isinstance(results, (tuple, list)) else (results,)) if each is not None]


def _relative_error(want: torch.Tensor, have: torch.Tensor) -> float:
    """The largest difference divided by the largest finite magnitude; infinite unless infinities and NaN are in the
    same places."""
    if not want.is_floating_point() or not want.numel():
        return 0.0 if torch.equal(want, have) else float("inf")
    finite = want.isfinite()
    if not torch.equal(finite, have.isfinite()):
        return float("inf")
    scale, worst = (float(each.where(finite, 0).abs().max()) for each in (want, want.double() - have.double()))
    return worst / scale if scale else worst
