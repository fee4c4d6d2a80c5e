"""What Python code can ask its process, if no variable holds the answer. The answers are texts that can be compared."""

from __future__ import annotations

import decimal
import locale
import logging
import threading
import time
import warnings

import torch
import torch.distributed as dist

from lowtide.program.precision import tf32

_DEVICES = ("cpu", "cuda", "xpu", "mps")


def backends() -> str:
    """The flags of ``torch.backends``."""
    matmul, cudnn, mkldnn = torch.backends.cuda.matmul, torch.backends.cudnn, torch.backends.mkldnn
    reduced = matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction
    flags = tf32(matmul), reduced, matmul.allow_fp16_accumulation, torch.backends.mha.get_fastpath_enabled()
    convolutions = cudnn.enabled, cudnn.benchmark, cudnn.deterministic, tf32(cudnn), cudnn.benchmark_limit
    others = mkldnn.enabled, mkldnn.deterministic, torch.backends.opt_einsum.enabled, torch.backends.opt_einsum.strategy
    filled = getattr(torch.utils.deterministic, "fill_uninitialized_memory", None)
    return str((flags, convolutions, others, torch.backends.quantized.engine, filled))


def ranks() -> str:
    """Whether there are several processes, and the rank of this one."""
    there = dist.is_available() and dist.is_initialized()
    return str((dist.get_rank(), dist.get_world_size(), dist.get_backend()) if there else None)


def autocast() -> str:
    """On which devices autocast is enabled, and its types."""
    return str([(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _DEVICES])


def decimals() -> str:
    """The context of decimal arithmetic, without the flags that were raised."""
    context = decimal.getcontext()
    traps = [kind.__name__ for kind, raised in context.traps.items() if raised]
    return str((context.prec, context.rounding, context.Emin, context.Emax, context.capitals, context.clamp, traps))


def loggers() -> str:
    """For loggers whose settings were changed: their levels, handlers and filters."""
    manager, kind = logging.root.manager, logging.Logger
    told = [
        (one.name, one.level, one.disabled, one.propagate, [*map(id, one.handlers)], [*map(id, one.filters)])
        for one in (logging.root, *manager.loggerDict.values())
        if isinstance(one, kind) and (one.level or one.handlers or one.filters or one.disabled or not one.propagate)
    ]
    return str((manager.disable, told))


def errors() -> str:
    """Which warnings are raised as errors. The first filter that matches decides, so filters count up to the last that
    raises."""
    filters = [*warnings.filters]
    last = max((place for place, one in enumerate(filters) if one[0] == "error"), default=-1)
    return str(filters[: last + 1])


def thread() -> str:
    own = threading.current_thread()
    return str((own.name, own.ident, own.daemon))


def threads() -> str:
    """The threads that exist."""
    return str([(one.name, one.ident, one.daemon) for one in threading.enumerate()])


def culture() -> str:
    """How numbers and texts are written (the locale), and the time zone."""
    return str((locale.setlocale(locale.LC_ALL), time.tzname, time.timezone))
