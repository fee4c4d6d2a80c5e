"""Models that are parallel by tensors (``parallelize_module``), two processes on the CPU."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.launch import torchrun

_PROGRAM = "tests.integrations.tp_program"
_ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "scenario",
    [
        "bits_and_peaks",
        "dropout",
        "distributed_results",
        "distributed_arguments",
        "collectives_in_one_order",
        "better_plans_and_other_shapes",
    ],
)
def test_scenario(scenario: str) -> None:
    assert torchrun(_PROGRAM, scenario).count("passed") == 2


@pytest.mark.slow
def test_a_killed_rank_ends_the_other() -> None:
    """With the error of the collective that it did not come to, long before the group's timeout."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join([str(_ROOT / "src"), str(_ROOT), os.environ.get("PYTHONPATH", "")])
    common = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", _PROGRAM, "killed"], cwd=_ROOT, text=True, stderr=subprocess.PIPE,
            env={**os.environ, **common, "WORLD_SIZE": "2", "RANK": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        (_, error), _ = (rank.communicate(timeout=240) for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [1, 3]
    assert "ExecutionError" in error
    assert "another process" in error
