"""Record the decisions of operators in one run of a module, and repeat them in the next. Decisions are numbers that
Python reads from tensors, and discrete results of continuous values.

Few operators decide, and a dispatch mode would send all operators through Python. So these few get kernels under a
dispatch key (``Fake``) that lies below autograd and that PyTorch does not use. The key is enabled during a run; all
other operators fall through it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from lowtide.capture.trace.classes import TRACED
from lowtide.capture.trace.patches import replaced
from lowtide.dynamic.patches import UncompiledMode, uncompiled
from lowtide.errors import ExecutionError

_ATEN = torch.ops.aten
DECIDING = {  # operators with discrete results of continuous values, or that return a Python number
    _ATEN._local_scalar_dense.default, _ATEN.equal.default, _ATEN.nonzero.default, _ATEN.multinomial.default,
    _ATEN.topk.default, _ATEN.kthvalue.default, _ATEN.mode.default, _ATEN.sort.default, _ATEN.sort.stable,
    _ATEN.argmax.default, _ATEN.argmin.default, _ATEN.max.dim, _ATEN.min.dim,
    _ATEN.bucketize.Tensor, _ATEN.searchsorted.Tensor,
    _ATEN.lt.Scalar, _ATEN.le.Scalar, _ATEN.gt.Scalar, _ATEN.ge.Scalar, _ATEN.eq.Scalar, _ATEN.ne.Scalar,
    _ATEN.lt.Tensor, _ATEN.le.Tensor, _ATEN.gt.Tensor, _ATEN.ge.Tensor, _ATEN.eq.Tensor, _ATEN.ne.Tensor,
}  # fmt: skip
_KEY = "Fake"
_LARGE = 1 << 12  # bytes: decisions up to this size are always copied
_NOTHING: tuple[Any, Any] = (None, None)
_DISCRETE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_registered: list[torch.library.Library] = []  # kernels exist as long as these

Decide = Callable[..., Any]  # takes an operator and its arguments


class _Deciding(threading.local):
    by: Decide | None = None


_deciding = _Deciding()


@contextlib.contextmanager
def recording(decisions: list[Any]) -> Iterator[None]:
    """A context in which decisions of this thread's operators are appended to ``decisions``."""

    def decide(operator: Any, *args: Any, **kwargs: Any) -> Any:
        result = operator(*args, **kwargs)
        decisions.append((operator, pytree.tree_map(_discrete, result)))
        return result

    with _decided_by(decide):
        yield


@contextlib.contextmanager
def replaying(decisions: Sequence[Any]) -> Iterator[None]:
    """A context in which this thread's operators repeat ``decisions``. Raises ``ExecutionError`` if other operators
    run. Operators that draw random numbers still draw, so that later draws are the same."""
    left = iter(list(decisions))

    def decide(operator: Any, *args: Any, **kwargs: Any) -> Any:
        known, decided = next(left, _NOTHING)
        if known is not operator:
            raise ExecutionError(
                "a module that is run again in the backward pass does something else than in the forward pass "
                f"({operator} instead of {known}): it depends on what lies outside of the model. Run the model under "
                "lowtide.online."
            )
        leaves, spec = pytree.tree_flatten(decided)
        leaves = [leaf.copied() if isinstance(leaf, _Decided) else leaf for leaf in leaves]
        if torch.Tag.nondeterministic_seeded in operator.tags or any(leaf is None for leaf in leaves):
            results = pytree.tree_leaves(operator(*args, **kwargs))
            leaves = [new if old is None else old for old, new in zip(leaves, results, strict=True)]
        return pytree.tree_unflatten(leaves, spec)

    with _decided_by(decide):
        yield


@contextlib.contextmanager
def _decided_by(decide: Decide) -> Iterator[None]:
    key = _key()
    around = _Mode(decide) if key is None else torch._C._IncludeDispatchKeyGuard(key)
    with replaced(_deciding, "by", decide), around:
        yield


@functools.cache
def _key() -> Any:
    """The dispatch key, with the kernels registered; ``None`` if this build of PyTorch lacks it."""
    try:
        key: Any = torch._C._dispatch_key_parse(_KEY)
        below = torch._C.DispatchKeySet(key)
        library: Any = torch.library.Library
        every, own = library("_", "IMPL", _KEY), library("aten", "IMPL", _KEY)
        every.fallback(torch.library.fallthrough_kernel)
        for operator in DECIDING:
            own.impl(operator, _kernel(operator, below), _KEY)
    except (AttributeError, RuntimeError, TypeError):
        return None
    _registered.extend((every, own))
    return key


def _kernel(operator: Any, below: Any) -> Decide:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(below):
            decide = _deciding.by
            if decide is None or any(
                isinstance(one, TRACED) for one in args
            ):  # a compilation in between decides nothing
                return operator(*args, **kwargs)
            return decide(operator, *args, **kwargs)

    return run


class _Mode(UncompiledMode):
    """A dispatch mode for builds without the key."""

    def __init__(self, decide: Decide) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.decide = decide

    @uncompiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.decide(func, *args, **(kwargs or {})) if func in DECIDING else func(*args, **(kwargs or {}))


class _Decided:
    """A tensor of discrete values: a copy if it is small, else the tensor itself until an operator writes to it. Below
    autograd, ``detach`` makes a tensor with a version counter of its own."""

    def __init__(self, tensor: torch.Tensor) -> None:
        counted = not tensor.is_inference() and tensor.nbytes > _LARGE
        self._values = tensor.detach() if counted else tensor.clone()
        self._counter = tensor if counted else self._values
        self._version = tensor._version if counted else 0

    def copied(self) -> torch.Tensor | None:
        """A copy of the values; ``None`` if they were written to since (``mask.logical_not_()``) and have to be
        computed again."""
        is_written = self._counter is not self._values and self._counter._version != self._version
        return None if is_written else self._values.clone()


def _discrete(value: Any) -> Any:
    """What to keep of a result: everything but tensors of continuous values."""
    if isinstance(value, torch.Tensor):
        return _Decided(value) if value.dtype in _DISCRETE else None
    return value
