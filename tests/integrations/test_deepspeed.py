"""DeepSpeed's ZeRO on CPUs over gloo, where it is installed (from its sources, it needs no compiled operators for this)."""

from __future__ import annotations

import pytest

from tests.integrations.launch import torchrun

pytest.importorskip("deepspeed")


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["stages_1_and_2", "stage_3"])
def test_scenario(scenario: str) -> None:
    assert torchrun("tests.integrations.deepspeed_program", scenario).count("passed") == 2
