"""Compiled kernels: numba with its cache on disk where some folder can be written, compiled per process elsewhere.

numba tries the package's own ``__pycache__``, then the user's cache folder (``NUMBA_CACHE_DIR`` overrides both), and
raises where neither can be written; a read-only installation then pays the compilation once per process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])


def kernel(function: Function) -> Function:
    """``function`` compiled without the interpreter."""
    try:
        return cast(Function, numba.njit(cache=True, nogil=True)(function))
    except RuntimeError as error:
        logger.info("no folder for compiled kernels can be written (%s): compiling for this process only", error)
        return cast(Function, numba.njit(nogil=True)(function))


def inner(function: Function) -> Function:
    """As ``kernel``, for what kernels call often: it may not allocate, and its arrays are passed without counting
    references, which costs more than a short function does."""
    options: dict[str, Any] = {"nogil": True, "_nrt": False}
    return cast(Function, numba.njit(**options)(function))
