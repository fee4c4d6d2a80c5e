"""Modules of a user's, which commands are told to import."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


def importable(name: str, text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test ends, the working folder is ``folder``, and has the module ``name``."""
    (folder / f"{name}.py").write_text(text)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, name, raising=False)
