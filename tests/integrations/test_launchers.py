"""Models that launchers shard by FSDP2: accelerate, Transformers' Trainer, Lightning, and scripts under ``lowtide run``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.launch import launched, torchrun

_PROGRAM, _SCRIPT = "tests.integrations.launchers_program", "tests/integrations/launched_script.py"
_TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node=2")
_ACCELERATE = (
    "accelerate.commands.launch", "--use_fsdp", "--fsdp_version=2", "--fsdp_auto_wrap_policy=TRANSFORMER_BASED_WRAP",
    "--fsdp_transformer_layer_cls_to_wrap=GPT2Block", "--num_processes=2", "--num_machines=1", "--mixed_precision=no",
    "--dynamo_backend=no",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "scenario", ["accelerate_with_fsdp2", "accelerate_with_options", "trainer_with_fsdp", "lightning_with_fsdp2"]
)
def test_scenario(scenario: str) -> None:
    assert torchrun(_PROGRAM, scenario).count("passed") == 2


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "by"), [(_TORCHRUN, "itself"), (_ACCELERATE, "accelerate")])
def test_an_unchanged_script(launcher: tuple[str, ...], by: str, tmp_path: Path) -> None:
    """Losses of each rank as without ``lowtide run``, in every call by a plan."""
    losses = []
    for number, words in enumerate(((), ("-m", "lowtide", "run", "--budget", "50%"))):
        folder = tmp_path / str(number)
        folder.mkdir()
        said = launched(*launcher, *words, _SCRIPT, "--by", by, str(folder))
        losses.append([(folder / str(rank)).read_text() for rank in range(2)])
    assert losses[0] == losses[1]
    assert losses[0][0] != losses[0][1], "ranks have data of their own"
    assert "3 of 3" in said
