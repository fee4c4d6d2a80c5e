"""``make gpu`` where there is no accelerator; with one, it is tested in ``tests/device``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import gpu


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_without_an_accelerator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--results", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("no accelerator: PyTorch") and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_folder_names() -> None:
    assert gpu.folder_name("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3"
