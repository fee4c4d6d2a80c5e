"""A fast way for the tracer to record operators that take only known tensors and sizes, and plain values.

PyTorch's own way flattens the arguments several times, describes each result twice, and handles cases that most
operators do not have (decompositions, constants). It still records composite operators, operators that write into
arguments, and operators that take constants.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental import proxy_tensor
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.capture.trace.expected import QUESTIONS
from lowtide.capture.trace.results import PLAIN, is_composite, writes_nothing
from lowtide.program.layouts import stretch_of

_DEVICE = torch.ops.prim.device.default
_FRESH = torch.ops.aten.lift_fresh.default
_LEFT = {_FRESH, torch.ops.aten.lift_fresh_copy.default, _DEVICE}


class UnknownError(Exception):
    """Raised for an argument that the fast way cannot record."""


def recording(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """The tracer's ``__torch_dispatch__`` with the fast way where it applies. Questions about values go to the fake tensor
    mode: the tracer would answer those about constants itself, unrecorded."""

    def run(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device
        if func in QUESTIONS:
            return func(*args, **kwargs)
        if func is _FRESH and type(args[0]) is torch.Tensor and (memory := _memory(args[0])) is not None:
            lifted = run(mode, func, types, (memory,))
            return run(mode, torch.ops.aten.as_strided.default, types, (lifted, *_strided(args[0])))
        try:
            noted = nodes_of(mode.tracer, args, kwargs) if is_simple(func) else None
        except UnknownError:
            noted = None
        if noted is None:
            return dispatch(mode, func, types, args, kwargs)
        result = func(*args, **kwargs)
        note(mode.tracer, func, noted, result)
        return result

    return run


def added(like: fx.Node, target: Any, *args: Any, name: str | None = None, **kwargs: Any) -> fx.Node:
    """Add an operator at the insertion point of the graph of ``like``, with the metadata of that node."""
    node = like.graph.create_node("call_function", target, args, kwargs, name)
    node.meta = {key: item for key, item in like.meta.items() if key not in ("val", "tensor_meta", "desc")}
    values: Any = fx.map_arg((args, kwargs), lambda one: one.meta["val"])
    node.meta["val"] = target(*values[0], **values[1])
    return node


def nodes_of(tracer: Any, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """An operator's arguments in the form that its node holds. Raises ``UnknownError``."""
    return tuple(_node_of(one, tracer) for one in args), {name: _node_of(one, tracer) for name, one in kwargs.items()}


def note(tracer: Any, func: Any, nodes: tuple[tuple[Any, ...], dict[str, Any]], result: Any) -> None:
    """Record that ``func`` of these nodes has made ``result``."""
    _follow(tracer, result, tracer.create_node("call_function", func, *nodes, name=_name(func)))


def _memory(constant: torch.Tensor) -> torch.Tensor | None:
    """For a constant that is not contiguous, the memory behind it as a flat tensor; else ``None``. The tracer lifts
    constants by a copy, which would be contiguous."""
    if constant.layout is not torch.strided or constant.is_quantized or constant.is_conj() or constant.is_neg():
        return None
    if constant.is_contiguous() or constant.requires_grad:
        return None
    with _disable_current_modes():
        return stretch_of(constant)


def _strided(constant: torch.Tensor) -> tuple[list[int], list[int]]:
    return [*constant.shape], [*constant.stride()]


@functools.lru_cache(maxsize=1 << 12)
def is_simple(func: Any) -> bool:
    """Whether calls of ``func`` can be recorded the fast way."""
    if not writes_nothing(func) or func in _LEFT or is_composite(func):
        return False
    return torch.Tag.data_dependent_output not in func.tags


@functools.lru_cache(maxsize=1 << 12)
def _name(func: Any) -> str:
    return fx.Graph()._target_to_str(func.overloadpacket.__name__)


def _node_of(value: Any, tracer: Any) -> Any:
    kind = type(value)
    if kind in PLAIN:
        return value
    if kind is FakeTensor:
        found = tracer.tensor_tracker.get(value)
        if found is None or found.constant is not None:
            raise UnknownError
        return found.proxy.node
    if kind is torch.SymInt:
        size = proxy_tensor.fetch_sym_proxy(tracer)(value)
        return size.node if isinstance(size, fx.Proxy) else size
    if kind is list or kind is tuple:
        return kind(_node_of(one, tracer) for one in value)
    raise UnknownError


def _follow(tracer: Any, result: Any, node: fx.Node) -> None:
    """Track ``result`` as the result of ``node``."""
    node.meta["val"] = result
    if isinstance(result, torch.Tensor):
        proxy = fx.Proxy(node, tracer)
        if isinstance(result, FakeTensor) and result._has_symbolic_sizes_strides:
            proxy_tensor.track_tensor(result, proxy, constant=None, tracer=tracer)
        else:
            proxy_tensor.set_proxy_slot(result, tracer, proxy_tensor._ProxyTensor(proxy, None))
    elif isinstance(result, Sequence):
        for number, part in enumerate(result):
            if part is not None:
                _follow(tracer, part, tracer.create_node("call_function", operator.getitem, (node, number), {}))
