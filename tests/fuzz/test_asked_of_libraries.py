# ruff: noqa: E501
"""Between two steps something changes that code asks libraries for, or of functions and classes themselves: the next one is as in
eager."""

from __future__ import annotations

import gc
import importlib.util
import inspect
import io
import logging
import math
import os
import shutil
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lowtide.capture.trace.patches import replaced
from tests.fuzz.changed import Reader, follows

_LOGGER = logging.getLogger("lowtide_test.asked")
_ABSENT = "lowtide_test_absent"


class Base:
    pass


class First(Base):
    scale = 1.0


class Other:
    function = "expm1"

    @staticmethod
    def act(x: float) -> float:
        return x


def act(x: float) -> float:
    return x


def _imported(state: Any) -> float:
    try:
        import lowtide_test_found  # type: ignore[import-not-found]  # noqa: F401
    except ImportError:
        return 1.0
    finally:
        sys.modules.pop("lowtide_test_found", None)
    return 2.0


def _waiting() -> None:
    threading.Thread(target=_EVENT.wait, daemon=True).start()


class _OfTestWarning(Warning):
    """Raised, as the cases begin."""


def _warned(kind: type[Warning]) -> Callable[[Any], float]:
    def read(state: Any) -> float:
        try:
            warnings.warn("of a test", kind, stacklevel=1)
        except kind:
            return 2.0
        return 1.0

    return read


def _of_first(state: Any) -> float:
    found: float = Base.__subclasses__()[0].scale  # type: ignore[attr-defined]
    return found


_CASES: dict[str, tuple[Callable[[Any], Any], Callable[[], Any]]] = {
    "module that is there": (lambda s: 1.0 + ("lowtide_test_absent" in sys.modules), lambda: sys.modules.update({_ABSENT: types.ModuleType(_ABSENT)})),
    "list of a library": (lambda s: len(sys.path), lambda: sys.path.append("/lowtide_test")),
    "object of a library": (lambda s: 1.0 + isinstance(sys.stdout, io.StringIO), lambda: setattr(sys, "stdout", io.StringIO())),
    "warnings that are raised": (_warned(FutureWarning), lambda: warnings.simplefilter("error", FutureWarning)),
    "warnings that are raised no more": (_warned(_OfTestWarning), lambda: warnings.simplefilter("ignore", _OfTestWarning)),
    "whether the collector is enabled": (lambda s: 1.0 + gc.isenabled(), gc.disable),
    "how often the collector looks": (lambda s: gc.get_threshold()[0] / 700, lambda: gc.set_threshold(1400, 10, 10)),
    "threads of backward passes": (lambda s: 1.0 + torch.autograd.is_multithreading_enabled(), lambda: torch._C._set_multithreading_enabled(False)),
    "kernels of oneDNN that repeat their results": (lambda s: 1.0 + torch.backends.mkldnn.deterministic, lambda: setattr(torch.backends.mkldnn, "deterministic", True)),
    "engine for quantized tensors": (lambda s: len(torch.backends.quantized.engine), lambda: setattr(torch.backends.quantized, "engine", "qnnpack")),
    "what fills new tensors": (lambda s: 1.0 + torch.utils.deterministic.fill_uninitialized_memory, lambda: setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)),
    "how numbers are printed": (lambda s: torch._tensor_str.PRINT_OPTS.precision, lambda: torch.set_printoptions(precision=7)),
    "filters of warnings": (lambda s: len(warnings.filters), lambda: warnings.simplefilter("ignore", _OfTestWarning, append=True)),
    "seed of a generator": (lambda s: _GENERATOR.initial_seed(), lambda: _GENERATOR.manual_seed(5)),
    "handlers of a logger": (lambda s: 1.0 + len(_LOGGER.handlers), lambda: _LOGGER.addHandler(logging.NullHandler())),
    "filters of a logger": (lambda s: 1.0 + len(_LOGGER.filters), lambda: _LOGGER.addFilter(lambda record: True)),
    "handlers of a logger above": (lambda s: 1.0 + len(_LOGGER.parent.handlers), lambda: logging.getLogger("lowtide_test").addHandler(logging.NullHandler())),
    "handlers of a logger by its name": (lambda s: 1.0 + len(logging.getLogger("lowtide_test." + "asked").handlers), lambda: _LOGGER.addHandler(logging.NullHandler())),
    "whether a logger by its name passes messages on": (lambda s: 1.0 + logging.getLogger("lowtide_test." + "asked").propagate, lambda: setattr(_LOGGER, "propagate", False)),
    "flag of PyTorch's": (lambda s: 1.0 + torch.__future__.get_overwrite_module_params_on_conversion(), lambda: torch.__future__.set_overwrite_module_params_on_conversion(True)),
    "precision of products": (lambda s: len(torch.get_float32_matmul_precision()), lambda: torch.set_float32_matmul_precision("medium")),
    "whether anomalies are looked for": (lambda s: 1.0 + torch.is_anomaly_enabled(), lambda: torch.autograd.set_detect_anomaly(True)),
    "whether all warnings are shown": (lambda s: 1.0 + torch.is_warn_always_enabled(), lambda: torch.set_warn_always(True)),
    "number of threads": (lambda s: threading.active_count(), _waiting),
    "threads": (lambda s: len(threading.enumerate()), _waiting),
    "function under a computed name": (lambda s: 1.0 + getattr(math, s.function)(1.0), lambda: setattr(math, "expm1", lambda x: x)),
    "operator under a computed name": (lambda s: getattr(F, s.function)(torch.ones(1)), lambda: setattr(F, "expm1", lambda x: x)),
    "operator that was there before": (lambda s: getattr(F, s.function[:2])(torch.ones(1)), lambda: _LIST.__setitem__(0, 2.0)),
    "method of tensors under a computed name": (lambda s: getattr(torch.ones(1), s.function)(), lambda: setattr(torch.Tensor, "expm1", lambda x: x)),
    "name of a level": (lambda s: len(logging.getLevelName(17)), lambda: logging.addLevelName(17, "seventeen")),
    "name of a function": (lambda s: len(act.__name__), lambda: setattr(act, "__name__", "activation")),
    "documentation of a function": (lambda s: 1.0 + (act.__doc__ is None), lambda: setattr(act, "__doc__", "As it is.")),
    "documentation of a function by another one": (lambda s: 1.0 + (inspect.getdoc(act) is None), lambda: setattr(act, "__doc__", "As it is.")),
    "annotations of a function": (lambda s: len(act.__annotations__), lambda: act.__annotations__.pop("x")),
    "name of a class": (lambda s: len(type(s).__name__), lambda: setattr(Other, "__name__", "Another")),
    "documentation of a class": (lambda s: 1.0 + (type(s).__doc__ is None), lambda: setattr(Other, "__doc__", "One.")),
    "number of subclasses": (lambda s: len(Base.__subclasses__()), lambda: _SUBCLASSES.append(type("Second", (Base,), {}))),
    "attribute of a subclass": (_of_first, lambda: setattr(First, "scale", 2.0)),
}  # fmt: skip
_SUBCLASSES: list[Any] = []
_LIST = [1.0]
_EVENT = threading.Event()
_GENERATOR = torch.Generator().manual_seed(2)


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    above = logging.getLogger("lowtide_test")
    annotations, path = dict(act.__annotations__), [*sys.path]
    thresholds, engine, deterministic = (
        gc.get_threshold(),
        torch.backends.quantized.engine,
        torch.backends.mkldnn.deterministic,
    )
    F.expm1, F.ex = torch.expm1, lambda x: x * _LIST[0]  # type: ignore[attr-defined]
    with warnings.catch_warnings(), replaced(sys, "stdout", sys.stdout), replaced(math, "expm1", math.expm1):
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("error", _OfTestWarning)
        yield
    gc.enable()
    gc.set_threshold(*thresholds)
    torch._C._set_multithreading_enabled(True)
    torch.backends.quantized.engine, torch.backends.mkldnn.deterministic = engine, deterministic  # type: ignore[assignment]
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.set_printoptions(precision=4)
    _GENERATOR.manual_seed(2)
    torch.__future__.set_overwrite_module_params_on_conversion(False)
    torch.set_float32_matmul_precision("highest")
    torch.autograd.set_detect_anomaly(False)
    torch.set_warn_always(False)
    del F.expm1, F.ex  # type: ignore[attr-defined]
    if "expm1" in vars(torch.Tensor):
        del torch.Tensor.expm1
    _LIST[0], _LOGGER.propagate = 1.0, True
    _EVENT.set()
    _EVENT.clear()
    sys.path[:], act.__name__, act.__doc__, act.__annotations__ = path, "act", None, annotations
    sys.modules.pop(_ABSENT, None)
    _LOGGER.handlers, _LOGGER.filters, above.handlers = [], [], []
    Other.__name__, Other.__doc__, First.scale = "Other", None, 1.0
    _SUBCLASSES.clear()


@pytest.mark.parametrize("name", _CASES)
def test_what_is_asked_of_libraries(name: str) -> None:
    read, change = _CASES[name]
    follows(Reader(Other(), read), lambda model: (change(), None)[1])


SEARCHES: dict[str, Callable[[Any], float]] = {
    "found": lambda s: 1.0 + (importlib.util.find_spec("lowtide_test_found") is not None),
    "imported": _imported,
}


@pytest.mark.parametrize("how", SEARCHES)
@pytest.mark.parametrize("known", [True, False])
def test_modules_that_are_looked_for(how: str, known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One appears in a folder that was looked into before, or a folder that has it is added to the others."""

    def appears(model: Any) -> None:
        (tmp_path / "lowtide_test_found.py").write_text("")
        importlib.invalidate_caches()
        if not known:
            monkeypatch.syspath_prepend(tmp_path)

    monkeypatch.setattr(sys, "path", [*sys.path])
    if known:
        monkeypatch.syspath_prepend(tmp_path)
    importlib.util.find_spec("lowtide_test_other")  # what is in the folder is known from now on
    follows(Reader(None, SEARCHES[how]), appears)


def test_the_path_that_programs_are_looked_for_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "lowtide_test_program"
    program.write_text("")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", os.environ["PATH"])
    state = Reader(None, lambda s: 1.0 + (shutil.which("lowtide_test_program") is not None))
    follows(state, lambda model: monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep))


def test_where_links_lead(tmp_path: Path) -> None:
    names = tmp_path / "short", tmp_path / "longer"
    for path in names:
        path.write_text("")
    link = tmp_path / "link"
    link.symlink_to(names[0])

    def changes(model: Any) -> None:
        link.unlink()
        link.symlink_to(names[1])

    follows(Reader(None, lambda s: len(os.readlink(link))), changes)
