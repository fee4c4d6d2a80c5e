"""Ranks that die, stall, or cannot keep to a budget, in real processes: errors that say so, and restarts that go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.launch import ended, torchrun

_PROGRAM = "tests.integrations.failures_program"
_TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node=2")


@pytest.mark.slow
def test_an_elastic_restart_finds_its_plans(tmp_path: Path) -> None:
    """Nothing is measured or searched for again; the others of the first attempt end by an error."""
    own = {"LOWTIDE_PLAN_CACHE": "1", "LOWTIDE_CACHE_DIR": str(tmp_path)}
    own["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else gloo finds the addresses of the first attempt
    code, output = ended(*_TORCHRUN, "--max-restarts=1", "-m", _PROGRAM, "restarted", **own)
    assert code == 0, output
    assert output.count("restarted passed") == 2


@pytest.mark.slow
def test_a_rank_that_stalls() -> None:
    """The other one waits as long as its process group does, and says for what."""
    code, output = ended(*_TORCHRUN, "-m", _PROGRAM, "stalled")
    assert code != 0
    assert "ExecutionError" in output
    assert "not come to it in time" in output


@pytest.mark.slow
def test_too_little_memory_on_one_rank() -> None:
    """Is heard on all, before the first step."""
    assert torchrun(_PROGRAM, "too_little_for_one").count("passed") == 2


@pytest.mark.slow
def test_the_recorder_hears_of_another_order() -> None:
    """Which no rank notices by itself."""
    code, output = ended(*_TORCHRUN, "-m", _PROGRAM, "in_another_order")
    assert code != 0
    assert "AssertionError: group 0, ranks" in output
