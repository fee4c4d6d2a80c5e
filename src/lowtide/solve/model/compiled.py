"""Compiled kernels: numba with its cache on disk where some folder can be written, compiled per process elsewhere.

numba looks only at the file of the kernel itself to tell whether a cached one is still valid, not at the kernels it calls
in other files. So the cache lies in a folder named after all of this package's sources, in the user's cache folder
(``NUMBA_CACHE_DIR`` says otherwise).
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import platformdirs

logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])


def kernel(function: Function) -> Function:
    """``function`` compiled without the interpreter."""
    config: Any = numba.config
    elsewhere = config.CACHE_DIR
    config.CACHE_DIR = elsewhere or _cache_folder()
    try:
        return cast(Function, numba.njit(cache=True, nogil=True)(function))
    except RuntimeError as error:
        logger.info("no folder for compiled kernels can be written (%s): compiling for this process only", error)
        return cast(Function, numba.njit(nogil=True)(function))
    finally:
        config.CACHE_DIR = elsewhere


def inner(function: Function) -> Function:
    """As ``kernel``, for what kernels call often: it may not allocate, and its arrays are passed without counting
    references, which costs more than a short function does."""
    options: dict[str, Any] = {"nogil": True, "_nrt": False}
    return cast(Function, numba.njit(**options)(function))


@functools.cache
def _cache_folder() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return str(Path(platformdirs.user_cache_dir("lowtide")) / f"kernels-{digest.hexdigest()[:16]}")
