"""A pipeline on paper: what each of its stages takes, and how long a step of all of them does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.cli.main import main
from lowtide.cost.links import collective_ns, get_link
from lowtide.whole_step.pipelined import PipelineFit, step_ns
from lowtide.whole_step.stage import Stage
from tests.support.samples import importable
from tests.support.versions import needs_known_fsdp2

pytestmark = needs_known_fsdp2

_MODULE = """
import torch
from torch import nn

def block(width):
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

def build(stage, batch=4, width=32):
    with torch.device("meta"):
        blocks = nn.ModuleList(block(width) for _ in range(4 if stage == 1 else 2))
        return nn.Sequential(*blocks), (torch.empty(batch, 64, width),)

def whole(batch=1):
    return build(0, batch)
"""
_ON = ["--planner", "greedy", "--device"]


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path / "cache"))
    importable("piped", _MODULE, tmp_path, monkeypatch)


def fitted(stage: int, micro_batches: int, device: str = "64GiB", **options: Any) -> lowtide.Fit:
    with torch.device("meta"):
        blocks = (nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(3))
        model, sample = nn.Sequential(*blocks), torch.empty(256, 32)
    given = {"mesh": "pp=4", "planner": "greedy", **options}
    return lowtide.fits(model, (sample,), stage=stage, micro_batches=micro_batches, device=device, **given)


def in_flight_of(fit: lowtide.Fit) -> int:
    assert fit.stage is not None
    return fit.stage.in_flight


def test_memory_grows_with_what_is_in_flight() -> None:
    """Evenly, from two on: each more saves as much, and so does each stage before another one."""
    passes = [fitted(0, count).pass_bytes for count in (2, 3, 4)]
    assert passes[1] - passes[0] == passes[2] - passes[1] > 0
    more = [fitted(0, count) for count in (4, 8)]
    assert [in_flight_of(fit) for fit in more] == [4, 4]
    assert more[0].pass_bytes == more[1].pass_bytes
    assert more[0].without_bytes < more[1].without_bytes, "inputs and buffers of all micro-batches stay"
    stages = [fitted(stage, 8) for stage in range(4)]
    assert [in_flight_of(fit) for fit in stages] == [4, 3, 2, 1]
    taken = [fit.pass_bytes for fit in stages]
    assert taken == sorted(taken, reverse=True)


def test_gradients_of_earlier_micro_batches_are_counted() -> None:
    """On the last stage too, which has one in flight."""
    one, two = fitted(3, 1), fitted(3, 2)
    assert two.pass_bytes == one.pass_bytes + two.parameter_bytes
    assert two.plan is not None
    assert (two.plan.in_flight, two.plan.waiting_bytes) == (1, two.parameter_bytes)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_plan_has_room_for_all_of_them(stage: int) -> None:
    free = fitted(stage, 4)
    fit = fitted(stage, 4, f"{free.resident_bytes + int(0.75 * free.pass_bytes)} B")
    assert not fit.fits_without
    assert fit.plan is not None
    assert fit.peak_bytes is not None
    assert fit.peak_bytes <= fit.room_bytes
    assert fit.plan.overhead > 0
    assert dict(fit.passes)["with the plan"].peak_bytes == fit.peak_bytes
    assert f"in_flight={4 - stage}" in str(fit) or stage == 3
    assert "4 micro-batches in flight" in str(fit)


def test_what_does_not_fit_says_what_it_lacks() -> None:
    free = fitted(0, 4)
    fit = fitted(0, 4, f"{free.resident_bytes + free.pass_bytes // 50} B")
    assert not fit
    enough = fitted(0, 4, f"{fit.capacity_bytes + fit.missing_bytes} B")
    assert enough


def test_the_schedule_is_one_forward_one_backward() -> None:
    stage = Stage(2, 4, 3)
    assert stage.passes == [(False, 0), (False, 1), (True, 0), (False, 2), (True, 1), (True, 2)]
    assert len(Stage(0, 4, 2).passes) == 4


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (2, 1), (4, 2), (4, 8)])
def test_even_stages_wait_for_the_known_bubble(stages: int, micro_batches: int) -> None:
    each = [Stage(number, stages, micro_batches) for number in range(stages)]
    assert step_ns([(10, 20)] * stages, each) == 30 * (micro_batches + stages - 1)


def test_a_slow_stage_and_slow_sends_take_longer() -> None:
    each = [Stage(number, 3, 5) for number in range(3)]
    assert step_ns([(10, 20), (100, 200), (10, 20)], each) == 10 + 5 * 300 + 20
    sending = [Stage(number, 3, 5, send_ns=7) for number in range(3)]
    assert step_ns([(10, 20), (100, 200), (10, 20)], sending) == 10 + 7 + 5 * 300 + 7 + 20


def test_all_stages(capsys: pytest.CaptureFixture[str]) -> None:
    """Of which the second has twice the layers."""
    asked = ["plan", "piped:build", "--mesh", "pp=3,dp=2", "--link", "pp=infiniband", *_ON, "H100-80GB"]
    assert main([*asked, "--micro-batches", "6", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"]
    assert found["even_bubble"] == pytest.approx(2 / 8)
    assert [one["stage"]["in_flight"] for one in found["stages"]] == [3, 2, 1]
    assert (found["tightest"], found["steps"]["with the plan"]["slowest"]) == (1, 1)
    sent = found["stages"][0]["stage"]
    assert sent["sent_bytes"] == 4 * 64 * 32 * 4
    assert sent["send_ns"] == collective_ns("send", sent["sent_bytes"], 2, get_link("infiniband-ndr"))
    assert found["stages"][2]["stage"]["send_ns"] == 0
    busy = 6 * found["stages"][1]["passes"]["with the plan"]["time_ns"]
    step = found["steps"]["with the plan"]
    assert busy < step["time_ns"] < 1.5 * busy + 20 * sent["send_ns"]
    assert step["bubble"] == pytest.approx(1 - busy / step["time_ns"])
    assert main([*asked, "--micro-batches", "6"]) == 0
    said = capsys.readouterr().out
    assert "a pipeline over pp=3,dp=2 fits on H100-80GB" in said
    assert "the slowest is stage 1" in said
    assert "stage 1" in said.split("fits least")[1]
    assert not torch.distributed.is_initialized()


def test_a_stage_that_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """Is named, and there is no step with plans."""
    asked = ["fits", "piped:build", "--mesh", "pp=2", *_ON, "1MiB", "--micro-batches", "4", "--json"]
    assert main(asked) == 3
    found = json.loads(capsys.readouterr().out)
    assert found["tightest"] == 1
    assert "with the plan" not in found["steps"]
    assert "without a plan" in found["steps"]
    assert main(asked[:-1]) == 3
    assert "does not fit" in capsys.readouterr().out


def test_the_largest_batch_of_all_stages(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "piped:build", "--mesh", "pp=2", *_ON, "4MiB", "--micro-batches", "2"]
    assert main([*asked, "--largest", "batch", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    number = found["searched"]["number"]
    assert 0 < found["searched"]["without"] < number
    for given, code in ((number, 0), (number + 1, 3)):
        Path(f"given{given}.py").write_text(
            f"import piped\ndef build(stage):\n    return piped.build(stage, batch={given})\n"
        )
        assert main(["plan", f"given{given}.py:build", *asked[2:]]) == code


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["piped:build", "--mesh", "pp=2"], "give their number"),
        (["piped:build", "--mesh", "dp=2", "--micro-batches", "2"], "give a mesh with pp="),
        (["piped:build", "--mesh", "dp=2"], "missing 1 required positional argument: 'stage'"),
        (["piped:whole", "--mesh", "pp=2", "--micro-batches", "2"], "no argument 'stage'"),
        (["piped:build", "--mesh", "pp=2", "--micro-batches", "2", "--offload", "cpu"], "offload= does not go with"),
    ],
)
def test_commands_that_make_no_sense(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments, "--device", "H100-80GB"]) == 2
    assert words in capsys.readouterr().err


def test_no_micro_batch(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "piped:build", "--mesh", "pp=2", "--micro-batches", "0", "--device", "H100-80GB"])
    assert "0 is below 1" in capsys.readouterr().err
    assert main(["plan", "piped:build", "--budget", "50%", "--micro-batches", "2"]) == 2
    assert "--micro-batches is that of a --mesh" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("stage", "micro_batches", "words"),
    [(4, 2, "whose stages are 0 to 3"), (-1, 2, "whose stages"), (0, 0, "1 micro-batch or more")],
)
def test_numbers_that_make_no_sense(stage: int, micro_batches: int, words: str) -> None:
    with pytest.raises(lowtide.PlanError, match=words):
        fitted(stage, micro_batches)


def test_the_stage_that_fits_least() -> None:
    fits = tuple(fitted(stage, 8) for stage in range(4))
    assert PipelineFit(fits).tightest is fits[0]
