"""Modes of the process and of modules that decide which program a call needs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules import module as _hooked

_C: Any = torch._C
_CASTING = ("cpu", "cuda", "xpu", "mps")  # device types with autocast
_einsum: Any = torch.backends.opt_einsum  # decides the order of products
_GLOBAL_HOOKS = (_hooked._global_forward_pre_hooks, _hooked._global_forward_hooks)  # by ids that are never reused


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_deterministic(mode: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(mode[0], warn_only=mode[1])


def _anomalies() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def _set_anomalies(mode: tuple[bool, bool]) -> None:
    torch.set_anomaly_enabled(mode[0], check_nan=mode[1])


def _cast_to() -> tuple[torch.dtype, ...]:
    """The default types of autocast, by device type."""
    return tuple(map(torch.get_autocast_dtype, _CASTING))


def _set_cast_to(mode: tuple[torch.dtype, ...]) -> None:
    for device_type, dtype in zip(_CASTING, mode, strict=True):
        torch.set_autocast_dtype(device_type, dtype)


def _einsum_mode() -> tuple[Any, Any]:
    return (_einsum.enabled, _einsum.strategy) if _einsum.is_available() else (False, None)


def _set_einsum_mode(mode: tuple[Any, Any]) -> None:
    if _einsum.is_available():
        _einsum.enabled, _einsum.strategy = mode


_FLAGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_num_threads, torch.set_num_threads),
    (_deterministic, _set_deterministic),
    (torch.get_default_dtype, torch.set_default_dtype),
    (_anomalies, _set_anomalies),
    (_cast_to, _set_cast_to),
    # Flags that decide which kernels operators choose in a trace.
    (_C._get_flash_sdp_enabled, _C._set_sdp_use_flash),
    (_C._get_mem_efficient_sdp_enabled, _C._set_sdp_use_mem_efficient),
    (_C._get_math_sdp_enabled, _C._set_sdp_use_math),
    (_C._get_cudnn_sdp_enabled, _C._set_sdp_use_cudnn),
    (lambda: tuple(_C._get_sdp_priority_order()), lambda order: _C._set_sdp_priority_order([*order])),
    (_C._get_cudnn_enabled, _C._set_cudnn_enabled),
    (_C._get_mkldnn_enabled, _C._set_mkldnn_enabled),
    (_einsum_mode, _set_einsum_mode),
)
Modes = tuple[tuple[bool, ...], tuple[Any, ...]]


def modes_of(modules: Sequence[nn.Module]) -> Modes:
    """The modes that can be set: training mode of each module, and flags of the process."""
    return tuple(module.training for module in modules), tuple(read() for read, _ in _FLAGS)


def fixed_modes() -> tuple[Any, ...]:
    """Modes that are only compared: hooks of all modules, and the attention function, which context parallelism
    replaces."""
    return (*map(tuple, _GLOBAL_HOOKS), functional.scaled_dot_product_attention)


@contextlib.contextmanager
def modes_as(modules: Sequence[nn.Module], modes: Modes) -> Iterator[None]:
    """A context in which the modules and the process have these ``modes``."""
    now = modes_of(modules)
    _change(modules, now, modes)
    try:
        yield
    finally:
        _change(modules, modes, now)


def _change(modules: Sequence[nn.Module], before: Modes, after: Modes) -> None:
    for module, old, new in zip(modules, before[0], after[0], strict=True):
        if old != new:
            module.training = new
    for (_, write), old, new in zip(_FLAGS, before[1], after[1], strict=True):
        if old != new:
            write(new)
