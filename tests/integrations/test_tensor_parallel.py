"""Models that are parallel by tensors (``parallelize_module``), two processes on the CPU."""

from __future__ import annotations

import pytest

from tests.integrations.launch import ranks_of, torchrun

_PROGRAM = "tests.integrations.tp_program"


@pytest.mark.slow
@pytest.mark.parametrize(
    "scenario",
    [
        "bits_and_peaks",
        "beside_computing",
        "dropout",
        "distributed_results",
        "distributed_arguments",
        "collectives_in_one_order",
        "better_plans_and_other_shapes",
        "in_parts",
        "hooks_on_the_model_itself",
    ],
)
def test_scenario(scenario: str) -> None:
    assert torchrun(_PROGRAM, scenario).count("passed") == 2


@pytest.mark.slow
def test_a_killed_rank_ends_the_other() -> None:
    """With the error of the collective that it did not come to, long before the group's timeout."""
    (first, second), error = ranks_of(_PROGRAM, "killed")
    assert (first, second) == (1, 3)
    assert "ExecutionError" in error
    assert "another process" in error


@pytest.mark.slow
def test_transformers_own_plan() -> None:
    assert torchrun("tests.integrations.transformers_program", "by_its_own_plan").count("passed") == 2
