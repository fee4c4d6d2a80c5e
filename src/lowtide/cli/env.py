"""``lowtide env``: versions, device, caches, and missing optional packages."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
from collections.abc import Iterator
from pathlib import Path

from lowtide.extras import EXTRAS
from lowtide.report.tables import fact_lines
from lowtide.version import __version__

_NEEDED = ("torch", "numpy", "platformdirs", "filelock", "msgspec")


def run(options: argparse.Namespace) -> int:
    from lowtide.planning.cache import enabled, plan_folder
    from lowtide.store import cache_folder

    facts = [("lowtide", __version__), ("python", f"{platform.python_version()} on {platform.platform()}")]
    facts += [(name, version(name) or "missing") for name in _NEEDED]
    facts += [*_devices(), ("cost cache", _contents(cache_folder() / "costs"))]
    facts.append(("plan cache", _contents(plan_folder()) if enabled() else "off (LOWTIDE_PLAN_CACHE)"))
    for name, extra in EXTRAS.items():
        facts.append((f"{name} (optional)", version(name) or f"missing: pip install 'lowtide[{extra}]'"))
    print("\n".join(fact_lines(dict(facts), indent="")))
    return 0


def version(package: str) -> str | None:
    """The installed version; ``None`` if the package is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> Iterator[tuple[str, str]]:
    import torch

    from lowtide.device import accelerators

    yield "cpu", f"{os.cpu_count()} cores, {torch.get_num_threads()} threads in PyTorch"
    for each in accelerators():
        total_bytes = each.total_bytes()
        size = "unknown memory" if total_bytes is None else f"{total_bytes / 2**30:.1f} GiB"
        yield str(each.device), f"{each.name()}, {size}"


def _contents(folder: Path) -> str:
    files = [path for path in folder.glob("*.json") if path.is_file()] if folder.is_dir() else []
    size = sum(path.stat().st_size for path in files)
    return f"{folder}: {len(files)} files, {size / 2**10:.0f} KiB" if files else f"{folder}: empty"
