"""A fast way through functionalization for operators that write nothing.

Operators that return new memory need no functionalization: they go directly from the functional mode to the tracer and
the fake mode. PyTorch's own way flattens their arguments several times and passes the dispatcher three times.
Functionalization must know of operators that return a view of one tensor; for them, only steps that others need are left
out.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._mode_utils import no_dispatch

from lowtide.capture.trace.real_strides import tensors_among
from lowtide.capture.trace.recorder import UnknownError, is_simple, nodes_of, note
from lowtide.capture.trace.results import PLAIN

_MODES = torch._C._TorchDispatchModeKey
_FUNCTIONALIZE = torch._C.DispatchKey.Functionalize
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_KEYS = torch._C.DispatchKeySet(_FUNCTIONALIZE)
_SHARING = {torch.ops.aten._unsafe_view.default, torch.ops.aten.lift_fresh.default}  # not said by schemas
_RESIZING = torch.ops.aten.resize_.default, torch.ops.aten.resize_as_.default


def as_it_is(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator that writes nothing under the functional ``mode``, if it takes only tensors known to that mode, and
    plain values; else return ``NotImplemented``."""
    kind = _kind(func)
    tracing = torch._C._get_dispatch_mode(_MODES.PROXY)
    if kind is None or tracing is None:
        return NotImplemented
    try:
        args, kwargs = _given(func, args, kwargs)
        inner = [_inner(one, mode) for one in args], {name: _inner(one, mode) for name, one in kwargs.items()}
        if next(tensors_among((*inner[0], *inner[1].values())), None) is None:  # only numbers in place of tensors
            return NotImplemented
        if kind == "view":
            return _viewed(mode, func, args, kwargs)
        noted = nodes_of(tracing.tracer, *inner)
    except UnknownError:
        return NotImplemented
    with _Without(_MODES.PROXY):
        with _Without(_MODES.FAKE) as faking:
            result = faking.__torch_dispatch__(func, (FakeTensor,), *inner)
        note(tracing.tracer, func, noted, result)
        return _outer(result, mode)


def of_constants(mode: Any, func: Any, result: Any) -> Any:
    """Make an operator's result functional if it is new memory. Functionalization ignores operators that take only tensors
    it does not know (constants that a model holds), and would not notice writes into their results."""
    results = result if isinstance(result, (tuple, list)) else (result,)
    if not all(type(one) is FakeTensor for one in results):
        return result
    if not results or not isinstance(func, torch._ops.OpOverload) or not _makes_memory(func):
        return result
    with _Without(_MODES.PROXY):
        return _outer(result, mode)


@functools.lru_cache(maxsize=1 << 12)
def _makes_memory(func: Any) -> bool:
    """Whether what an operator returns shares no memory with its arguments."""
    schema = func._schema
    return func not in _SHARING and all(one.alias_info is None for one in (*schema.arguments, *schema.returns))


@functools.lru_cache(maxsize=1 << 12)
def _kind(func: Any) -> str | None:
    """For an operator that can take the fast way, whether it returns "new" memory or a "view"; else ``None``."""
    if not is_simple(func) or func in FunctionalTensor.metadata_fns:
        return None
    if _COMPOSITE in func.py_kernels:  # ``native_batch_norm``, which writes all the same
        return None
    schema = func._schema
    returned = [str(one.type) for one in schema.returns]
    takes = ["Tensor" in str(one.type) for one in schema.arguments]
    if returned == ["Tensor"] and func.is_view and takes[:1] == [True] and sum(takes) == 1:
        return "view"
    if any(one.alias_info is not None for one in (*schema.arguments, *schema.returns)):
        return None
    if not any(takes) or not {*returned} <= {"Tensor", "List[Tensor]"}:
        return None
    return None if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "Functionalize") else "new"


def _given(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments without those that are ``None`` by default: the dispatcher leaves out undefined tensors too."""
    absent = _absent(func)
    count = len(args)
    while count and args[count - 1] is None and absent[count - 1] is not None:
        count -= 1
    return args[:count], {name: one for name, one in kwargs.items() if one is not None or name not in absent}


@functools.lru_cache(maxsize=1 << 12)
def _absent(func: Any) -> tuple[str | None, ...]:
    """For each position, the name of the argument if it is ``None`` by default; else ``None``."""
    arguments = func._schema.arguments
    return tuple(one.name if one.has_default_value() and one.default_value is None else None for one in arguments)


def _inner(value: Any, mode: Any) -> Any:
    """The fake tensor in a functional one, or a plain value. Raises ``UnknownError``."""
    kind = type(value)
    if kind in PLAIN or kind is torch.SymInt:
        return value
    if kind is FunctionalTensor:
        if torch._functionalize_has_data_mutation(value.elem):  # type: ignore[attr-defined]
            if not hasattr(mode, "_sync_view_replay_annotations"):  # in earlier versions of PyTorch
                raise UnknownError
            mode._sync_view_replay_annotations((value,), {})
        inner = torch._from_functional_tensor(value.elem)
        if inner.is_conj() or inner.is_neg() or inner._is_zerotensor():
            raise UnknownError
        return inner
    if kind is list or kind is tuple:
        return kind(_inner(one, mode) for one in value)
    raise UnknownError


class _Without:
    """A context without a dispatch mode. The tracer would record computations with symbolic sizes too."""

    def __init__(self, mode: Any) -> None:
        self._mode = mode

    def __enter__(self) -> Any:
        self._mode = torch._C._unset_dispatch_mode(self._mode)
        return self._mode

    def __exit__(self, *error: object) -> None:
        torch._C._set_dispatch_mode(self._mode)


def _functionalized(func: Any, elem: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operator under functionalization, for the tensor ``elem`` inside a functional one."""
    included = torch._C._dispatch_tls_local_include_set() | _KEYS
    excluded = torch._C._dispatch_tls_local_exclude_set().remove(_FUNCTIONALIZE) - FunctionalTensor._extra_dispatch_keys
    with torch._C._ForceDispatchKeyGuard(included, excluded):
        before = torch._functionalize_enable_reapply_views(True)  # type: ignore[attr-defined]
        try:
            return func._op_dk(_FUNCTIONALIZE, elem, *args, **kwargs)
        finally:
            torch._disable_functionalization()  # type: ignore[no-untyped-call]
            torch._functionalize_enable_reapply_views(before)  # type: ignore[attr-defined]


def _viewed(mode: Any, func: Any, args: Any, kwargs: Any) -> FunctionalTensor:
    elem = _functionalized(func, args[0].elem, args[1:], kwargs)
    with _Without(_MODES.PROXY):
        view = FunctionalTensor(elem, mode)
        torch._functionalize_unsafe_set(view, args[0])
    return view


def resized(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Run ``resize_`` so that a tensor that grows gets memory on its own device. PyTorch's own way leaves it with memory of
    another device, and then it cannot have views."""
    if func not in _RESIZING or type(args[0]) is not FunctionalTensor:
        return NotImplemented
    tensor = args[0]
    if func is not _RESIZING[0]:
        if kwargs:
            return NotImplemented
        with mode:
            return tensor.resize_(args[1].shape)
    _functionalized(func, tensor.elem, args[1:], kwargs)
    with _Without(_MODES.PROXY):
        larger = FunctionalTensor(tensor.elem, mode)
        if larger.untyped_storage().nbytes() > tensor.untyped_storage().nbytes():
            torch._functionalize_unsafe_set(tensor, larger)
        with no_dispatch():
            func(*args, **kwargs)
    return tensor


def _outer(result: Any, mode: Any) -> Any:
    """Wrap fake tensors into functional ones."""
    if isinstance(result, torch.Tensor):
        return FunctionalTensor(torch._to_functional_tensor(result), mode)
    if isinstance(result, tuple):
        return tuple(_outer(one, mode) for one in result)
    return [_outer(one, mode) for one in result] if isinstance(result, list) else result
