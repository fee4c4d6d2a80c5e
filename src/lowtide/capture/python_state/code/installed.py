"""Which files are of installed libraries, which are taken to be constant, and not of the user's own code.

Those are the files of Python's own library and of its folders for packages; elsewhere (``pip install --target``, a folder on
``PYTHONPATH``) those that an installed distribution lists. What is installed to be edited (``pip install -e``) is the user's.
"""

from __future__ import annotations

import functools
import site
import sysconfig
from pathlib import Path

_LIBRARIES = tuple({*site.getsitepackages(), *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")), "<frozen"})
_OURS = str(Path(__file__).parents[3])


@functools.lru_cache(maxsize=1 << 14)
def is_installed(filename: str) -> bool:
    """Whether it is a file of an installed library, or of this project."""
    if filename.startswith((*_LIBRARIES, _OURS)) or "site-packages" in filename:
        return True
    path = Path(filename)
    return path.is_absolute() and any(path.relative_to(folder).parts[0] in _listed(folder) for folder in path.parents)


@functools.lru_cache(maxsize=1 << 10)
def _listed(folder: Path) -> frozenset[str]:
    """The folders and files in this one that distributions have put there."""
    try:
        lists = [each.read_text(encoding="utf-8", errors="replace") for each in folder.glob("*.dist-info/RECORD")]
    except OSError:  # not to be read
        return frozenset()
    return frozenset(line.split(",")[0].partition("/")[0] for text in lists for line in text.splitlines())
