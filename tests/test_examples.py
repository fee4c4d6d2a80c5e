"""Every example runs by one command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[1]
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
_SECONDS = 580


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("examples/gpt2.py",), "step 20"),
        (("examples/t5.py",), "more time"),
        (("examples/resnet.py",), "batches seen by BatchNorm: 10"),
        (("examples/unet.py",), "budget"),
        (("examples/trainer.py",), "lowtide_measured_peak_mib"),
        (("examples/with_lightning.py",), "measured peak"),
        ((*_TORCHRUN, "examples/ddp.py"), "rank 1: peak"),
        ((*_TORCHRUN, "examples/fsdp2.py"), "rank 1, step 5"),
        (("examples/llama_7b.py",), "s in all"),
        (("examples/max_batch.py", "500MiB"), "times the batch"),
        (("-m", "examples.dynamic", "treelstm"), "equal to the bit at the end"),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else None,
)
def test_example(command: tuple[str, ...], said: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(
        [sys.executable, *command],
        cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert said in result.stdout
