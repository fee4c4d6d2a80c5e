"""Watch the files that a forward pass opens: a program is valid as long as they are unchanged since its capture."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.machinery
import os
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from lowtide.capture.python_state.code.installed import is_installed, is_standard
from lowtide.capture.trace.patches import all_wrapped, wrapped
from lowtide.errors import CaptureError
from lowtide.native import core

_CODE = (".pyc", ".so", ".pyd", ".dll")
_ELSEWHERE = ("subprocess.Popen", "sqlite3.connect", "socket.connect")
_READING = ("open", "os.listdir", "os.scandir", *_ELSEWHERE)  # events
_SYSTEM = ("/proc/", "/sys/", "/dev/", "/etc/")
# Functions that check whether a path exists, and of which kind it is.
_WHETHER = {"exists", "isfile", "isdir", "is_file", "is_dir", "islink", "is_symlink"}
_watching = threading.local()


class File(NamedTuple):
    """A file or folder, by the path as given (relative to the working folder). ``whole``: its content matters, not only whether
    it exists and its kind."""

    path: str
    whole: bool = True

    @property
    def text(self) -> str:
        return f"the file {self.path}"

    def state(self) -> Any:
        """A value that changes when the file is written or replaced; ``None`` if it does not exist."""
        try:
            found = os.stat(self.path)
        except OSError:
            return None
        if not self.whole:
            return stat.S_IFMT(found.st_mode)
        return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino


class Search(NamedTuple):
    """A folder in which Python looked for a module."""

    folder: str
    name: str

    @property
    def text(self) -> str:
        return f"the module {self.name} in {self.folder or '.'}"

    def state(self) -> Any:
        """A value that changes when the module is added to or removed from the folder."""
        path = os.path.join(self.folder, self.name)
        found = (os.path.exists(path + suffix) for suffix in importlib.machinery.all_suffixes())
        return os.path.exists(os.path.join(path, "__init__.py")), os.path.isdir(path), *found


Watched = File | Search


@contextlib.contextmanager
def opened(found: dict[Watched, Any]) -> Iterator[None]:
    """Inside the context, record in ``found``, with their states, the files that this thread opens, stats or checks for
    existence, and the folders that it lists. Not recorded, since they are not the model's data: shared libraries, devices,
    installed files, compilers' temporary files; nor stats and checks made by libraries' code."""
    _install()
    core.begin_watch()
    outer = getattr(_watching, "found", None)
    # Computed here, because ``tempfile`` holds a lock and opens a file when it first looks for its folder.
    _watching.compiled = os.path.join(tempfile.gettempdir(), "torchinductor_")
    _watching.found = found
    try:
        asking = all_wrapped([(os, name) for name in ("stat", "lstat", "access", "readlink")], _noting)
        with asking, wrapped(importlib.machinery.FileFinder, "find_spec", _noting_search):
            yield
    finally:
        _watching.found = outer
        core.end_watch()


@functools.cache
def _install() -> None:
    """Install an audit hook (PEP 578) for the life of the process. It is compiled because ``id`` raises an audit event too, and
    would take seven times as long with a Python hook."""
    core.watch_events(_READING, _note)
    ctypes.pythonapi.PySys_AddAuditHook(ctypes.c_void_p(core.audit_hook()), None)


@contextlib.contextmanager
def _unwatched() -> Iterator[dict[Watched, Any] | None]:
    """Yield the dictionary to record in; inside the context nothing is recorded."""
    found = getattr(_watching, "found", None)
    _watching.found = None
    try:
        yield found
    finally:
        _watching.found = found


def _note(event: str, args: tuple[Any, ...]) -> None:
    with _unwatched() as found:
        if found is None:
            return
        if event in _ELSEWHERE and _asking_code(sys._getframe(1))[0]:
            raise CaptureError(
                f"the forward pass asks another process or a database ({event}), whose answer may be another one in every "
                "call. Ask outside of the forward pass and keep or pass the answer, or run the model under lowtide.online."
            )
        if event not in _ELSEWHERE and isinstance(args[0], (str, bytes, os.PathLike)):
            _keep(found, os.fsdecode(args[0]))


def _asking_code(frame: Any) -> tuple[bool, set[str]]:
    """Whether the user's code makes the request, directly or through standard library functions, and the names of these."""
    names = set()
    while frame.f_back is not None and is_standard(str(frame.f_globals.get("__name__"))):
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    return not is_installed(frame.f_code.co_filename), names


def _keep(found: dict[Watched, Any], path: str, whole: bool = True) -> None:
    if not path.endswith(_CODE) and not _is_constant(os.path.abspath(path)):
        _add(found, File(path, whole))


def _add(found: dict[Watched, Any], one: Watched) -> None:
    if one not in found:
        found[one] = one.state()


def _noting(function: Callable[..., Any]) -> Callable[..., Any]:
    def asked(path: Any, *args: Any, **kwargs: Any) -> Any:
        with _unwatched() as found:
            if found is not None and isinstance(path, (str, bytes, os.PathLike)):
                theirs, names = _asking_code(sys._getframe(2))
                if theirs:
                    _keep(found, os.fsdecode(path), whole=not names & _WHETHER)
        return function(path, *args, **kwargs)

    return asked


def _noting_search(find: Callable[..., Any]) -> Callable[..., Any]:
    def searched(finder: Any, name: str, *args: Any) -> Any:
        with _unwatched() as found:
            if found is not None and _asking_code(sys._getframe(2))[0]:
                _add(found, Search(finder.path, name.rpartition(".")[2]))
        return find(finder, name, *args)

    return searched


def _is_constant(path: str) -> bool:
    """Whether a path belongs to the system, an installed library, or a cache of PyTorch's compiler."""
    return path.startswith((*_SYSTEM, sys.prefix, _watching.compiled)) or is_installed(path)
