"""What is installed is taken to be constant, wherever it lies; the user's own code is not."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import lowtide
from lowtide.capture.python_state.code.installed import is_installed
from lowtide.capture.python_state.guards.files import File, Watched, opened

_MODEL = """
import torch

SCALE = 1.0


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        return (torch.tanh(self.linear(x)) * SCALE).sum()
"""


def _written(folder: Path, name: str, record: str | None) -> Path:
    """A package, beside what a distribution lists."""
    package = folder / name
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(_MODEL)
    if record is not None:
        listed = folder / f"{name}-1.0.dist-info"
        listed.mkdir()
        (listed / "RECORD").write_text(record)
    return package / "__init__.py"


def test_by_what_distributions_list(tmp_path: Path) -> None:
    listed = _written(tmp_path / "listed", "one", "one/__init__.py,sha256=0,0\none-1.0.dist-info/RECORD,,\n")
    edited = _written(tmp_path / "edited", "two", "__editable___two_finder.py,sha256=0,0\n")
    plain = _written(tmp_path / "plain", "three", None)
    beside = tmp_path / "listed" / "train.py"
    assert [*map(is_installed, map(str, (listed, edited, plain, beside)))] == [True, False, False, False]
    assert is_installed(torch.__file__) and is_installed(json.__file__) and is_installed("<frozen importlib>")
    assert not is_installed(__file__) and not is_installed("<string>") and not is_installed("train.py")


def test_what_is_read_to_tell_is_no_read(tmp_path: Path) -> None:
    """The lists of distributions are files, too, which are opened the first time that a file of their folder is."""
    listed = _written(tmp_path, "one", "one/__init__.py,,\none-1.0.dist-info/RECORD,,\n")
    (tmp_path / "data.txt").write_text("2")
    found: dict[Watched, object] = {}
    with opened(found):
        assert listed.read_text() and (tmp_path / "data.txt").read_text()
    assert [*found] == [File(str(tmp_path / "data.txt"))]


@pytest.mark.parametrize("listed", [False, True])
def test_guards_on_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: bool) -> None:
    name = f"package_{'listed' if listed else 'own'}"
    _written(tmp_path, name, f"{name}/__init__.py,," if listed else None)
    monkeypatch.syspath_prepend(tmp_path)
    package: Any = importlib.import_module(name)
    try:
        model = package.Model()
        x = torch.ones(2, 4)
        lowtide.rematerialize(model, (x,), budget="100%", planner="greedy")
        model(x).backward()
        package.SCALE = 3.0
        model.zero_grad()
        loss = model(x)
        loss.backward()
        eager = (torch.tanh(model.linear(x)) * (1.0 if listed else 3.0)).sum()
        assert torch.equal(loss, eager)
    finally:
        sys.modules.pop(name)
