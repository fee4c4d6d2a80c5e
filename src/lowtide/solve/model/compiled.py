"""Compiled kernels: numba with its cache on disk where some folder can be written, compiled per process elsewhere.

numba looks only at the file of the kernel itself to tell whether a cached one is still valid, not at the kernels it calls
in other files. So the cache lies in a folder named after all of this package's sources, in the user's cache folder
(``NUMBA_CACHE_DIR`` says otherwise); folders of other sources go when they are out of use.

numba trusts what it reads, and raises what the disk does. Here files carry a digest, and one that cannot be read or written is
compiled anew, or not kept.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import platformdirs
from numba.core import caching

from lowtide.store import sources_key
from lowtide.store.files import LEFTOVER_SECONDS, by_last_use, is_old, mark_used

logger = logging.getLogger(__name__)
_numba: Any = caching  # without types

Function = TypeVar("Function", bound=Callable[..., Any])
_DIGEST_BYTES = hashlib.sha256().digest_size
_MOST_FOLDERS, _DAY_SECONDS = 4, 86_400  # of kernels, of other sources: those used last, and all used within a day


def kernel(function: Function) -> Function:
    """``function`` compiled without the interpreter."""
    config: Any = numba.config
    elsewhere = config.CACHE_DIR
    config.CACHE_DIR = elsewhere or _cache_folder()
    dispatcher: Any = numba.njit(nogil=True)(function)
    try:
        dispatcher._cache = _KernelCache(function)  # what cache=True does with numba's own
    except (RuntimeError, OSError) as error:
        logger.info("no folder for compiled kernels can be written (%s): compiling for this process only", error)
    finally:
        config.CACHE_DIR = elsewhere
    return cast(Function, dispatcher)


def inner(function: Function) -> Function:
    """As ``kernel``, for what kernels call often: it may not allocate, and its arrays are passed without counting
    references, which costs more than a short function does."""
    options: dict[str, Any] = {"nogil": True, "_nrt": False}
    return cast(Function, numba.njit(**options)(function))


class _SignedFiles(_numba.IndexDataCacheFile):  # type: ignore[misc]
    """numba's files of one kernel, each followed by its digest: damaged machine code must not run."""

    @contextlib.contextmanager
    def _open_for_write(self, filepath: str) -> Iterator[io.BytesIO]:
        with super()._open_for_write(filepath) as file:
            content = io.BytesIO()
            yield content
            file.write(content.getvalue() + hashlib.sha256(content.getvalue()).digest())

    def _load_index(self) -> Any:
        if Path(self._index_path).exists():
            _check(self._index_path)
        return super()._load_index()

    def _load_data(self, name: str) -> Any:
        _check(self._data_path(name))
        return super()._load_data(name)


def _check(path: str) -> None:
    content = Path(path).read_bytes()
    if hashlib.sha256(content[:-_DIGEST_BYTES]).digest() != content[-_DIGEST_BYTES:]:
        raise ValueError(f"{path} is damaged")


class _KernelCache(_numba.FunctionCache):  # type: ignore[misc]
    """numba's cache of one kernel, without errors: what cannot be loaded is compiled, what cannot be saved is not kept."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._cache_file = _SignedFiles(
            self._cache_path, self._impl.filename_base, self._impl.locator.get_source_stamp()
        )

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except (OSError, ValueError, EOFError) as error:
            logger.warning("ignoring a compiled kernel: %s", error)
            with contextlib.suppress(OSError):
                self._cache_file.flush()  # its index is read before anything is added to it
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except (OSError, ValueError, EOFError) as error:
            logger.warning("compiled kernels cannot be kept in %s: %s", self.cache_path, error)


@functools.cache
def _cache_folder() -> str:
    folder = Path(platformdirs.user_cache_dir("lowtide"))
    own = folder / f"kernels-{sources_key(Path(__file__).parents[1])[:16]}"
    mark_used(own)
    sweep_kernels(own)
    return str(own)


def sweep_kernels(own: Path) -> None:
    """Remove folders of kernels of other sources that are out of use, and what killed processes have left in ``own``."""
    with contextlib.suppress(OSError):
        others = [path for path in own.parent.glob("kernels-*") if path != own and path.is_dir()]
        for path in by_last_use(others)[_MOST_FOLDERS - 1 :]:
            if is_old(path, _DAY_SECONDS):
                shutil.rmtree(path, ignore_errors=True)
        for path in own.rglob("*.tmp.*"):
            if is_old(path, LEFTOVER_SECONDS):
                path.unlink(missing_ok=True)
