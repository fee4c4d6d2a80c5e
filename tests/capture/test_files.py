"""Files that the forward pass opens."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn

from lowtide.capture import capture
from lowtide.capture.python_state.guards.files import Watched, opened


class _Reading(nn.Module):
    """Scales by a number in a file, which it finds by way of the folder for temporary files."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.linear, self.name = nn.Linear(2, 2), name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = float((Path(tempfile.gettempdir()) / self.name).read_text())
        return (self.linear(x) * scale).sum()


def test_the_folder_for_temporary_files_is_looked_for_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python holds a lock while it tries folders, and opens files in them."""
    (tmp_path / "scale").write_text("2")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    found: dict[Watched, object] = {}
    with opened(found):
        monkeypatch.setattr(tempfile, "tempdir", None)
        assert tempfile.gettempdir() == str(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", None)
    capture(_Reading("scale"), (torch.ones(2),))
