"""Which files belong to installed libraries, which are taken to be constant, and not to the user.

These are the files of Python's own library and of its package folders. In other folders (``pip install --target``, a
folder on ``PYTHONPATH``) they are the files that an installed distribution lists. Packages in editable mode (``pip
install -e``) belong to the user.
"""

from __future__ import annotations

import functools
import site
import sys
import sysconfig
import types
from pathlib import Path
from typing import Any

_LIBRARIES = tuple({*site.getsitepackages(), *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")), "<frozen"})
_OURS = str(Path(__file__).parents[3])
_IMMUTABLE_TYPE, _HEAP_TYPE = 1 << 8, 1 << 9


@functools.lru_cache(maxsize=1 << 14)
def is_installed(filename: str) -> bool:
    """Whether the file is of an installed library, or of this project."""
    if filename.startswith((*_LIBRARIES, _OURS)) or "site-packages" in filename:
        return True
    path = Path(filename)
    return path.is_absolute() and any(path.relative_to(folder).parts[0] in _listed(folder) for folder in path.parents)


def is_standard(module: str) -> bool:
    """Whether a module of this name is Python's own."""
    return module != "__main__" and module.partition(".")[0] in sys.stdlib_module_names


def is_changeable(kind: type) -> bool:
    """Whether Python code has made the class, so that attributes can be added to it."""
    return bool(kind.__flags__ & _HEAP_TYPE)


def is_library(value: Any) -> bool:
    """Whether a module or class is of an installed library."""
    name = str(value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", ""))
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if is_standard(name) and isinstance(value, type) and module is not None and _is_made_for_others(value, module):
        return False
    return is_standard(name) if file is None else is_installed(file)


def _is_made_for_others(kind: type, module: types.ModuleType) -> bool:
    """Whether a function of Python's own has made the class for someone else (``dataclasses.make_dataclass``,
    ``types.new_class``, a call of ``abc.ABCMeta``): the module that the class names does not contain it."""
    made = kind.__flags__ & (_HEAP_TYPE | _IMMUTABLE_TYPE) == _HEAP_TYPE
    return made and kind.__qualname__.partition(".")[0] not in vars(module)


@functools.lru_cache(maxsize=1 << 10)
def _listed(folder: Path) -> frozenset[str]:
    """The folders and files in this folder that distributions have installed."""
    try:
        lists = [each.read_text(encoding="utf-8", errors="replace") for each in folder.glob("*.dist-info/RECORD")]
    except OSError:  # not readable
        return frozenset()
    return frozenset(line.split(",")[0].partition("/")[0] for text in lists for line in text.splitlines())
