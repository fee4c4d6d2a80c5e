"""What Python code can ask its process, where no variable shows the answer: texts that are equal where all answers are."""

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
    """Whether there are several processes, and which one this is."""
    there = dist.is_available() and dist.is_initialized()
    return str((dist.get_rank(), dist.get_world_size(), dist.get_backend()) if there else None)


def autocast() -> str:
    """Which devices operators are cast on, and to what."""
    return str([(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _DEVICES])


def decimals() -> str:
    """How decimal numbers are computed with, but not which flags that has raised."""
    context = decimal.getcontext()
    traps = [kind.__name__ for kind, raised in context.traps.items() if raised]
    return str((context.prec, context.rounding, context.Emin, context.Emax, context.capitals, context.clamp, traps))


def loggers() -> str:
    """Of loggers to which that was told: from which level on they say something, and which handlers and filters they have."""
    manager, kind = logging.root.manager, logging.Logger
    told = [
        (one.name, one.level, one.disabled, one.propagate, [*map(id, one.handlers)], [*map(id, one.filters)])
        for one in (logging.root, *manager.loggerDict.values())
        if isinstance(one, kind) and (one.level or one.handlers or one.filters or one.disabled or not one.propagate)
    ]
    return str((manager.disable, told))


def errors() -> str:
    """Which warnings are raised: of the filters, of which the first that fits decides, those up to the last that says so."""
    filters = [*warnings.filters]
    last = max((place for place, one in enumerate(filters) if one[0] == "error"), default=-1)
    return str(filters[: last + 1])


def thread() -> str:
    own = threading.current_thread()
    return str((own.name, own.ident, own.daemon))


def threads() -> str:
    """Which ones there are."""
    return str([(one.name, one.ident, one.daemon) for one in threading.enumerate()])


def culture() -> str:
    """How numbers and texts are written, and which hour of the day a time is."""
    return str((locale.setlocale(locale.LC_ALL), time.tzname, time.timezone))
