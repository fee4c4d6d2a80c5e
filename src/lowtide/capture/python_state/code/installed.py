"""Which files are of installed libraries, which are taken to be constant, and not of the user's own code.

Those are the files of Python's own library and of its folders for packages; elsewhere (``pip install --target``, a folder on
``PYTHONPATH``) those that an installed distribution lists. What is installed to be edited (``pip install -e``) is the user's.
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
    """Whether it is a file of an installed library, or of this project."""
    if filename.startswith((*_LIBRARIES, _OURS)) or "site-packages" in filename:
        return True
    path = Path(filename)
    return path.is_absolute() and any(path.relative_to(folder).parts[0] in _listed(folder) for folder in path.parents)


def is_standard(module: str) -> bool:
    """Whether it is the name of a module of Python's own."""
    return module != "__main__" and module.partition(".")[0] in sys.stdlib_module_names


def is_changeable(kind: type) -> bool:
    """Whether it is a class that Python code has made, to which attributes can be given."""
    return bool(kind.__flags__ & _HEAP_TYPE)


def is_library(value: Any) -> bool:
    """Whether a module or a class is of an installed library."""
    name = str(value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", ""))
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if is_standard(name) and isinstance(value, type) and module is not None and _is_made_for_others(value, module):
        return False
    return is_standard(name) if file is None else is_installed(file)


def _is_made_for_others(kind: type, module: types.ModuleType) -> bool:
    """Whether a function of Python's own has made the class for others (``dataclasses.make_dataclass``, ``types.new_class``, a
    call of ``abc.ABCMeta``): it is nowhere in the module that it says to be of."""
    made = kind.__flags__ & (_HEAP_TYPE | _IMMUTABLE_TYPE) == _HEAP_TYPE
    return made and kind.__qualname__.partition(".")[0] not in vars(module)


@functools.lru_cache(maxsize=1 << 10)
def _listed(folder: Path) -> frozenset[str]:
    """The folders and files in this one that distributions have put there."""
    try:
        lists = [each.read_text(encoding="utf-8", errors="replace") for each in folder.glob("*.dist-info/RECORD")]
    except OSError:  # not to be read
        return frozenset()
    return frozenset(line.split(",")[0].partition("/")[0] for text in lists for line in text.splitlines())
