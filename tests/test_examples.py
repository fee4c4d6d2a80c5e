"""Every example runs by one command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_EXAMPLES = Path(__file__).parents[1] / "examples"
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
_SECONDS = 580


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "launcher", "said"),
    [
        ("gpt2", (), "step 20"),
        ("t5", (), "more time"),
        ("resnet", (), "batches seen by BatchNorm: 10"),
        ("unet", (), "budget"),
        ("trainer", (), "lowtide_measured_peak_mib"),
        ("with_lightning", (), "measured peak"),
        ("ddp", _TORCHRUN, "rank 1: peak"),
        ("fsdp2", _TORCHRUN, "rank 1, step 5"),
        ("llama_7b", (), "s in all"),
    ],
)
def test_example(name: str, launcher: tuple[str, ...], said: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *launcher, str(_EXAMPLES / f"{name}.py")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert said in result.stdout
