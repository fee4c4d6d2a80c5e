"""Stages of a pipeline with plans of their own (``torch.distributed.pipelining``), two processes on the CPU."""

from __future__ import annotations

import pytest

from tests.integrations.launch import torchrun

_PROGRAM = "tests.integrations.pp_program"


@pytest.mark.slow
@pytest.mark.parametrize(
    "scenario",
    [
        "all_micro_batches",
        "as_many_as_stages_follow",
        "split_by_pytorch",
        "several_stages_of_a_rank",
        "stages_that_share_a_budget",
        "split_backward_passes_are_refused",
    ],
)
def test_scenario(scenario: str) -> None:
    assert torchrun(_PROGRAM, scenario).count("passed") == 2


@pytest.mark.slow
def test_sharded_stages() -> None:
    """Two stages, each sharded over two ranks."""
    assert torchrun(_PROGRAM, "sharded_stages", processes=4).count("passed") == 4
