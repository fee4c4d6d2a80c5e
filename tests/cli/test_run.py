"""``lowtide run`` and ``lowtide advise`` on training scripts that know nothing of them."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import json
import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lowtide.cli.main import main
from lowtide.integrations import roots, scripts

SCRIPTS = Path(__file__).parent / "scripts"
IGNORED = ["ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning"]  # the trainers' own
AsAlone = Callable[[list[str], list[str]], tuple[str, str, dict[str, Any]]]


@pytest.fixture(autouse=True)
def _at_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Scripts run in their folder, and leave nothing of a run behind."""
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(SCRIPTS)
    call, backward = nn.Module.__call__, torch.autograd.backward
    argv, path = sys.argv, list(sys.path)
    yield
    assert nn.Module.__call__ is call
    assert torch.autograd.backward is backward
    assert vars(nn.Module).keys().isdisjoint(("__reduce_ex__", "__prepare_scriptable__"))
    assert (sys.argv, sys.path) == (argv, path)
    for name in ("package", "package.gan"):
        sys.modules.pop(name, None)


def _alone(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What a script prints without lowtide."""
    with monkeypatch.context() as context, contextlib.suppress(SystemExit):
        context.setattr(sys, "argv", words[1:] if words[0] == "-m" else words)
        context.setattr(sys, "path", [str(SCRIPTS), *sys.path])
        if words[0] == "-m":
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
    return capsys.readouterr().out


def _run(options: list[str], words: list[str], tmp_path: Path) -> tuple[int, dict[str, Any]]:
    report = tmp_path / "run.json"
    code = main(["run", *options, "--report", str(report), *words])
    return code, json.loads(report.read_text())


@pytest.fixture
def as_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> AsAlone:
    """What a script, with options for ``lowtide run``, prints with and without lowtide, what lowtide says beside it, and the
    summary."""

    def compared(options: list[str], words: list[str]) -> tuple[str, str, dict[str, Any]]:
        expected = _alone(words, monkeypatch, capsys)
        code, summary = _run(options, words, tmp_path)
        printed, said = capsys.readouterr()
        assert code == 0, said
        assert printed == expected
        return expected, said, summary

    return compared


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seed", "bad", "plain.py"], "argument --seed: 'bad' is not a whole number"),
        (["--compiler", "best", "plain.py"], "invalid choice: 'best'"),
    ],
)
def test_bad_options_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", *words])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("lowtide: ")
    assert message in line


def _model(summary: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = (model for model in summary["models"] if model["model"] == name)
    assert isinstance(found, dict)
    return found


def test_a_plain_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The same losses; every call by a plan, of which the short last batch has its own; the peak as promised; the exit code."""
    words = ["plain.py", "7", "3"]
    expected = _alone(words, monkeypatch, capsys)
    code, summary = _run(["--budget", "70%"], words, tmp_path)
    printed, said = capsys.readouterr()
    assert code == 3
    assert printed == expected
    net = _model(summary, "Net")
    assert net["planned_calls"] == net["calls"] == 6
    assert net["plans"] == 2
    assert 0 < net["measured_peak_bytes"] <= net["planned_peak_bytes"] <= net["budget_bytes"]
    assert net["budget_bytes"] == net["unconstrained_peak_bytes"] * 70 // 100
    assert said.count("Net is planned") == 1
    assert "6 of 6" in said


def test_several_roots_of_a_module(caplog: pytest.LogCaptureFixture, as_alone: AsAlone) -> None:
    """Two models by turns are planned; what does not train is not found; what cannot be planned runs, and is named."""
    words = ["-m", "package.gan", "--steps", "3"]
    _, _, summary = as_alone(["--budget", "80%"], words)
    assert [model["model"] for model in summary["models"]] == ["Generator", "Discriminator", "Scale"]
    for name, calls in (("Generator", 3), ("Discriminator", 9)):
        model = _model(summary, name)
        assert model["planned_calls"] == model["calls"] == calls
        assert model["planned_peak_bytes"] <= model["budget_bytes"]
    assert _model(summary, "Scale")["calls"] == 3
    assert "depends on the values" in _model(summary, "Scale")["in_parts"]
    assert caplog.text.count("Scale runs without a plan") == 1


def test_models_that_are_called_before_they_train(as_alone: AsAlone) -> None:
    """Plans are of what trains, within a percentage of what that takes."""
    _, _, summary = as_alone(["--budget", "75%"], ["probed.py", "1024"])
    assert [model["model"] for model in summary["models"]] == ["Sequential", "Lazy", "Probed"]
    for name in ("Lazy", "Probed"):
        model = _model(summary, name)
        assert model["planned_calls"] == model["calls"] - 1 == 3
        assert model["planned_peak_bytes"] <= model["budget_bytes"]
        assert model["measured_peak_bytes"] <= 1.1 * model["budget_bytes"]
    assert _model(summary, "Sequential")["outside"] == "it is part of Probed"


def test_a_percentage_that_is_too_small(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Ends the script where it trains, if its model is not tiny."""
    monkeypatch.setattr(scripts, "SMALL_BYTES", 1 << 10)
    assert main(["run", "--budget", "50%", "probed.py", "1"]) == 3
    said = capsys.readouterr()
    assert "torch.Size([1, 1])" in said.out and "0x" not in said.out
    assert "the smallest budget it can meet is" in said.err


def test_a_larger_call_that_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], as_alone: AsAlone
) -> None:
    """Runs without a plan where it is little, and ends the script else."""
    script = tmp_path / "grows.py"
    script.write_text(
        "import torch\n"
        "from torch import nn\n"
        "class Chain(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.weight = nn.Parameter(torch.linspace(-1, 1, 4096).view(64, 64))\n"
        "    def forward(self, x):\n"
        "        weight = self.weight\n"
        "        for _ in range(9):\n"
        "            weight = weight.sin()\n"
        "        return (x @ weight).square().mean()\n"
        "model = Chain()\n"
        "torch.manual_seed(0)\n"
        "for rows in (4, 4, 1500, 1500, 4):\n"
        "    loss = model(torch.ones(rows, 64))\n"
        "    loss.backward()\n"
        "    print(loss.item().hex())\n"
    )
    expected, said, summary = as_alone(["--budget", "60%"], [str(script)])
    chain = _model(summary, "Chain")
    assert (chain["planned_calls"], chain["calls"]) == (2, 5)
    assert "more than 60% of its pass, but little" in chain["outside"]
    assert said.count("Chain runs without a plan") == 1
    monkeypatch.setattr(scripts, "SMALL_BYTES", 1 << 10)
    assert main(["run", "--budget", "60%", str(script)]) == 3
    printed, said = capsys.readouterr()
    assert printed.splitlines() == expected.splitlines()[:2]
    assert "lowtide: Chain: planner auto found no schedule" in said and "--skip Chain" in said
    assert said.count("more than 60% of its pass: its backward pass ends the script") == 2  # at once, and at the end


def test_what_is_found_out_again_is_told_once(tmp_path: Path, as_alone: AsAlone) -> None:
    script = tmp_path / "unread.py"
    script.write_text(
        "import torch\n"
        "class Net(torch.nn.Linear):\n"
        "    def forward(self, x, unread):\n"
        "        return super().forward(x).tanh()\n"
        "model = Net(8, 8)\n"
        "for rows in (64, 128, 256):\n"
        "    model(torch.ones(2, 8), torch.ones(rows)).sum().backward()\n"
    )
    _, said, _ = as_alone(["--budget", "60%"], [str(script)])
    assert said.count("Net runs without a plan") == 1


def test_a_model_of_which_nothing_can_be_freed(
    tmp_path: Path, as_alone: AsAlone, capsys: pytest.CaptureFixture[str]
) -> None:
    """A percentage of its pass ends no script: gradients of its parameters are most of what that takes. None is advised."""
    script = tmp_path / "critic.py"
    script.write_text(
        "import torch\n"
        "from torch import nn\n"
        "torch.manual_seed(0)\n"
        "critic = nn.Sequential(nn.Flatten(), nn.Linear(784, 512), nn.LeakyReLU(0.2), nn.Linear(512, 1))\n"
        "for _ in range(3):\n"
        "    loss = critic(torch.randn(16, 28, 28)).square().mean()\n"
        "    loss.backward()\n"
        "    print(loss.item().hex())\n"
    )
    _, _, summary = as_alone(["--budget", "60%"], [str(script)])
    assert "plans could free no more than" in _model(summary, "Sequential")["outside"]
    assert main(["run", "--budget", "1MiB", str(script)]) == 3  # bytes are what there is
    assert main(["advise", str(script)]) == 0
    assert "no budget well below the whole pass is met" in capsys.readouterr().out


def test_a_model_that_grows_at_equal_arguments(tmp_path: Path, as_alone: AsAlone) -> None:
    """Is planned when its passes have become much larger: by a number among its arguments, or as its layers are thawed."""
    script = tmp_path / "progressive.py"
    script.write_text(
        "import torch\n"
        "from torch import nn\n"
        "class Growing(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.steps = nn.ModuleList(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.Tanh()) for _ in range(8))\n"
        "        self.last = nn.Conv2d(8, 1, 1)\n"
        "    def forward(self, x, size):\n"
        "        x = nn.functional.interpolate(x, size=(size, size))\n"
        "        for step in self.steps:\n"
        "            x = step(x)\n"
        "        return self.last(x)\n"
        "torch.manual_seed(0)\n"
        "growing, thawed = Growing(), Growing()\n"
        "for size in (4, 4, 32, 32, 32):\n"
        "    loss = growing(torch.randn(8, 8, 4, 4), size).square().mean()\n"
        "    loss.backward()\n"
        "    print(loss.item().hex())\n"
        "for step in range(5):\n"
        "    thawed.steps.requires_grad_(step > 1)\n"
        "    loss = thawed(torch.randn(8, 8, 4, 4), 32).square().mean()\n"
        "    loss.backward()\n"
        "    print(loss.item().hex())\n"
    )
    _, _, summary = as_alone(["--budget", "60%"], [str(script)])
    for name in ("Growing", "Growing (2)"):
        model = _model(summary, name)
        assert (model["planned_calls"], model["calls"], model["outside"]) == (2, 5, "")
        assert model["planned_peak_bytes"] <= model["budget_bytes"]


@pytest.mark.parametrize(("script", "module"), [("trainer", "transformers"), ("lightning", "pytorch_lightning")])
@pytest.mark.filterwarnings(*IGNORED)
def test_trainers(script: str, module: str, as_alone: AsAlone) -> None:
    pytest.importorskip(module)
    _, _, summary = as_alone(["--budget", "60%"], [f"{script}.py"])
    first = summary["models"][0]
    assert first["planned_calls"] == first["calls"] > 5
    assert (
        summary["peak_bytes"] <= first["budget_bytes"] * 1.01
    )  # the loss of the Lightning script is outside of its model


@pytest.mark.filterwarnings(*IGNORED)
def test_arguments_that_are_sparse(tmp_path: Path, as_alone: AsAlone) -> None:
    """Their sizes tell whether a later call is a larger one."""
    script = tmp_path / "graph.py"
    script.write_text(
        "import torch\n"
        "from torch import nn\n"
        "class Graph(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))\n"
        "    def forward(self, x, edges):\n"
        "        for layer in self.layers:\n"
        "            x = layer(torch.sparse.mm(edges, x)).tanh()\n"
        "        return x.square().mean()\n"
        "torch.manual_seed(0)\n"
        "edges = torch.randn(1024, 1024).relu().mul(torch.rand(1024, 1024) > 0.99)\n"
        "model = Graph()\n"
        "for kind in ('to_sparse', 'to_sparse', 'to_sparse_csr'):\n"
        "    loss = model(torch.randn(1024, 32), getattr(edges, kind)())\n"
        "    loss.backward()\n"
        "    print(loss.item().hex())\n"
    )
    _, _, summary = as_alone(["--budget", "80%"], [str(script)])
    assert _model(summary, "Graph")["planned_calls"] >= 2


def test_a_script_that_fails(capsys: pytest.CaptureFixture[str]) -> None:
    """Its own traceback, without ours; what it trained until then is told."""
    assert main(["run", "--budget", "100%", "raises.py"]) == 1
    said = capsys.readouterr().err
    traceback = said[said.index("Traceback") : said.index("ValueError: the script's own")]
    assert traceback.count("File ") == traceback.count("raises.py") + traceback.count("nn/modules/module.py")
    assert "1 of 1" in said
    assert main(["run", "--budget", "60%", "raises.py"]) == 1  # a model so small ends nothing
    assert "more than 60% of its pass, but little" in capsys.readouterr().err


def test_an_impossible_budget(capsys: pytest.CaptureFixture[str]) -> None:
    """Ends the script at once, with the least that would do; the model may be left alone instead."""
    assert main(["run", "--budget", "1KiB", "plain.py", "0", "0"]) == 3
    said = capsys.readouterr().err
    assert "the smallest budget it can meet is" in said
    assert main(["run", "--budget", "1KiB", "--skip", "Net", "plain.py", "0", "0"]) == 0
    assert "0 of 6" in capsys.readouterr().err


@pytest.mark.filterwarnings(*IGNORED)
def test_scripted_models(tmp_path: Path, as_alone: AsAlone) -> None:
    """``torch.jit.script`` takes a trained model, by itself and in another one, and training goes on by its plan."""
    script = tmp_path / "scripted.py"
    script.write_text(
        "import torch\n"
        "from torch import nn\n"
        "torch.manual_seed(0)\n"
        "model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))\n"
        "class Outer(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.model = model\n"
        "    def forward(self, x):\n"
        "        return self.model(x) + 1\n"
        "outer = Outer()\n"
        "for _ in range(2):\n"
        "    model(torch.randn(512, 16)).square().mean().backward()\n"
        "    for scripted in torch.jit.script(model), torch.jit.script(outer):\n"
        "        print(scripted.code, scripted(torch.ones(2, 16)).sum().item().hex())\n"
        "    assert outer.model is model\n"
    )
    _, _, summary = as_alone(["--budget", "70%"], [str(script)])
    assert _model(summary, "Sequential")["planned_calls"] == 2


@pytest.mark.filterwarnings(*IGNORED)
def test_compiled_and_saved_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model that ``torch.compile`` made is planned in the compiled one's place; copies and saved models are as without us."""
    script = tmp_path / "compiled.py"
    script.write_text(
        "import copy, io, torch\n"
        "from torch import nn\n"
        "torch.manual_seed(0)\n"
        "model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))\n"
        "compiled = torch.compile(model)\n"
        "for _ in range(2):\n"
        "    compiled(torch.randn(512, 64)).square().mean().backward()\n"
        "assert 'forward' not in vars(copy.deepcopy(model))\n"
        "torch.save(model, file := io.BytesIO())\n"
        "assert b'lowtide' not in file.getvalue()\n"
        "other = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), backend='eager', fullgraph=True)\n"
        "def step(x): return model[0](x).sum()\n"
        "torch.compile(step, backend='eager', fullgraph=True)(torch.randn(2, 64)).backward()\n"
        "model.eval()(torch.randn(2, 64))\n"
        "class InPlace(nn.Sequential): pass\n"
        "model = InPlace(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))\n"
        "model.compile(backend='eager')\n"
        "for rows in (512, 100):\n"
        "    model(torch.randn(rows, 64)).square().mean().backward()\n"
        "assert 'forward' in vars(model) and model._compiled_call_impl is not None\n"
        "model.eval()(torch.randn(2, 64))\n"
    )
    code, summary = _run(["--budget", "80%", "--compiler", "eager"], [str(script)], tmp_path)
    assert code == 0, capsys.readouterr().err
    for model in (_model(summary, "Sequential"), _model(summary, "InPlace")):
        assert model["planned_calls"] == model["calls"] == 2
        assert model["planned_peak_bytes"] <= model["budget_bytes"]


@pytest.mark.filterwarnings(*IGNORED)
def test_wrapped_copied_and_checkpointed_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_alone: AsAlone
) -> None:
    """The model inside DistributedDataParallel is planned, and one that checkpoints itself; not ever new copies."""
    monkeypatch.setattr(roots, "_MOST_GONE", 2)
    script = tmp_path / "wrapped.py"
    script.write_text(
        "import copy, gc, torch, torch.distributed as dist\n"
        "from torch import nn\n"
        "from torch.utils.checkpoint import checkpoint\n"
        "class Net(nn.Sequential): pass\n"
        "class Checked(nn.Sequential):\n"
        "    def forward(self, x): return checkpoint(super().forward, x, use_reentrant=False)\n"
        "def layers(kind): return kind(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)))\n"
        "torch.manual_seed(0)\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "wrapped, checked, single = nn.parallel.DistributedDataParallel(layers(Net)), layers(Checked), layers(nn.Sequential)\n"
        "for _ in range(5):\n"
        "    x = torch.randn(64, 32)\n"
        "    loss = wrapped(x).sum() + checked(x).sum() + copy.deepcopy(single)(x).sum()\n"
        "    loss.backward()\n"
        "    print(loss.item().hex())\n"
        "    del loss\n"
        "    gc.collect()\n"
        "dist.destroy_process_group()\n"
    )
    _, _, summary = as_alone(["--budget", "100%"], [str(script)])
    net, checked, *copies = summary["models"]
    assert (net["model"], net["planned_calls"], net["calls"]) == ("Net", 5, 5)
    assert (checked["model"], checked["planned_calls"], checked["calls"]) == ("Checked", 5, 5)
    assert [copied["planned_calls"] for copied in copies] == [1, 1, 0]
    assert copies[-1]["calls"] == 3
    assert "come and go" in copies[-1]["outside"]


def test_online(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["-m", "package.gan", "--steps", "2"]
    expected = _alone(words, monkeypatch, capsys)
    gc.collect()
    assert main(["run", "--online", "--budget", "600KiB", *words]) == 0
    printed, said = capsys.readouterr()
    assert printed == expected
    assert "600.0 KiB" in said
    assert main(["run", "--online", "--budget", "10KiB", *words]) == 3
    assert "the budget is 10.0 KiB" in capsys.readouterr().err
    assert main(["run", "--online", *words]) == 2
    assert "in bytes" in capsys.readouterr().err


def test_nothing_is_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Arguments reach the script as they are, ours included; how it ends is how we end."""
    script = tmp_path / "plain.py"
    script.write_text("import sys\nprint(sys.argv[1:], sys.path[0], __name__, __file__)\nsys.exit('done')\n")
    assert main(["run", "--budget", "50%", str(script), "--budget", "3", "-m", "x"]) == 1
    printed, said = capsys.readouterr()
    assert printed == f"['--budget', '3', '-m', 'x'] {tmp_path} __main__ {script}\n"
    assert said.startswith("done\n")
    assert "called no module in training mode" in said
    assert main(["advise", str(script)]) == 2
    assert "nothing to advise on" in capsys.readouterr().err


@pytest.mark.parametrize("as_module", [False, True])
def test_arguments_are_the_script_s(
    as_module: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that abbreviate options of ours, and what follows two dashes."""
    (tmp_path / "told.py").write_text("import sys\nprint(sys.argv[1:])\n")
    monkeypatch.chdir(tmp_path)
    given = ["--c", "--plan=2", "-m", "x", "-h", "--version", "-1", "--", "--budget", "y"]
    assert main(["run", "--budget", "50%", *(["-m", "told"] if as_module else ["told.py"]), *given]) == 0
    assert capsys.readouterr().out == f"{given}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name a script"),
        (["none.py"], "there is no script none.py"),
        (["-m", "no_such_module"], "no_such_module cannot be run"),
        (["--planner", "magic", "plain.py"], "no planner is named"),
        (["--budget", "50%", "--total", "1GiB", "plain.py"], "either budget="),
        (["--report", "x.doc", "plain.py"], "must end in"),
    ],
)
def test_bad_input(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *words]) == 2
    printed, said = capsys.readouterr()
    assert message in said
    assert printed == ""


def test_advise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Stops after the steps that were asked for; the figures are those of the model, its optimizer, and its plans."""
    pytest.importorskip("jinja2")
    page = tmp_path / "advice.html"
    assert main(["advise", "--steps", "2", "-o", str(page), "plain.py", "0", "0"]) == 0
    printed, _ = capsys.readouterr()
    steps = [line for line in printed.splitlines() if line.startswith("0 ")]
    assert len(steps) == 1  # the second step is ended by its optimizer, before the script prints
    facts = [line.strip().partition("  ") for line in printed.splitlines() if line.startswith("  ")]
    parameters = (5 * (32 * 32 + 32) + 33) * 4
    named = {name: value.strip() for name, _, value in facts}
    assert named["parameters"] == f"{parameters / 1024:.1f} KiB"
    assert named["states of Adam"] == f"{(2 * parameters + 12 * 4) / 1024:.1f} KiB"
    assert "blocks.0" in printed
    assert "90.0 %" in printed
    assert "lowtide run --budget" in printed
    text = page.read_text()
    assert "states of Adam" in text
    assert "What memory costs" in text


def test_advice_is_on_what_trains(capsys: pytest.CaptureFixture[str]) -> None:
    """Not on a part that is called by itself first, nor on a call with one row."""
    assert main(["advise", "--steps", "7", "probed.py", "256"]) == 0
    printed, _ = capsys.readouterr()
    assert re.findall(r"^(.*): where memory goes", printed, re.MULTILINE) == ["Lazy", "Probed"]
    for predicted, measured in re.findall(r"backward pass +([\d.]+) KiB predicted, ([\d.]+) KiB measured", printed):
        assert float(predicted) == pytest.approx(float(measured), rel=0.2)  # a loss is outside of them


def test_advice_of_processes_that_train_together(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Is the first one's."""
    monkeypatch.setenv("RANK", "1")
    assert main(["advise", "--steps", "1", "plain.py", "0", "0"]) == 0
    assert "where memory goes" not in capsys.readouterr().out


def test_advice_leaves_forked_processes_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A process that ended after some steps would be waited for, for ever."""
    script = tmp_path / "forks.py"
    script.write_text(
        "import os, sys, torch\n"
        "model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "def train(steps):\n"
        "    for _ in range(steps):\n"
        "        model(torch.ones(4, 8)).sum().backward()\n"
        "        optimizer.step()\n"
        "reads, writes = os.pipe()\n"
        "if os.fork() == 0:\n"
        "    try:\n"
        "        train(2)\n"
        "        os.write(writes, b'trained')\n"
        "    finally:\n"
        "        os._exit(0)\n"
        "os.close(writes)\n"
        "print(os.read(reads, 99))\n"
        "train(1)\n"
    )
    assert main(["advise", "--steps", "1", str(script)]) == 0
    printed, _ = capsys.readouterr()
    assert printed.startswith("b'trained'")
    assert "Sequential: where memory goes" in printed


def test_advice_where_the_script_recomputes_by_itself(
    tmp_path: Path, recwarn: pytest.WarningsRecorder, capsys: pytest.CaptureFixture[str]
) -> None:
    """A budget is suggested only below what the script takes as it is, and no object warns that it was looked at."""
    script = tmp_path / "checkpointed.py"
    script.write_text(
        "import torch\n"
        "from torch import nn\n"
        "from torch.utils.checkpoint import checkpoint\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(2))\n"
        "    def forward(self, x):\n"
        "        for block in self.blocks:\n"
        "            x = x + checkpoint(block, x, use_reentrant=False)\n"
        "        return x\n"
        "model = Net()\n"
        "for _ in range(3):\n"
        "    model(torch.ones(512, 8)).square().mean().backward()\n"
    )
    assert main(["advise", str(script)]) == 0
    printed, _ = capsys.readouterr()
    ((budget, own),) = re.findall(r"takes ([\d.]+) KiB instead of the ([\d.]+) KiB that it takes by its own", printed)
    assert float(budget) < float(own)
    assert f"{own} KiB measured" in printed
    assert not [warning for warning in recwarn if "reduce_op" in str(warning.message)]


def test_a_loss_outside_of_the_model_is_told_of(tmp_path: Path) -> None:
    """Room for it, as the table asks for, keeps the passes within the budget."""
    script = tmp_path / "outside.py"
    script.write_text(
        "import torch\n"
        "from torch import nn\n"
        "wide = [nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32)) for _ in range(4)]\n"
        "model = nn.Sequential(*wide, nn.Linear(32, 1024))\n"
        "for _ in range(3):\n"
        "    rows = torch.ones(512, 32)\n"
        "    nn.functional.cross_entropy(model(rows), torch.zeros(512, dtype=torch.long)).backward()\n"
    )
    command = [sys.executable, "-m", "lowtide", "run", "--budget", "7MiB"]
    run = functools.partial(subprocess.run, capture_output=True, text=True, env=os.environ, timeout=300)
    said = run([*command, str(script)]).stderr
    found = re.search(r"Sequential: passes took .* more than the budget.* leave room with --reserve (\S+)", said)
    assert found is not None, said
    assert "--reserve" not in run([*command, "--reserve", found[1], str(script)]).stderr


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_interrupted_again_while_it_ends(tmp_path: Path) -> None:
    """What follows the script's own traceback is the summary, and no traceback of the interpreter's end."""
    script = tmp_path / "ends_late.py"
    script.write_text(
        "import atexit, os, signal, time\n"
        "atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT) or time.sleep(60))\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "time.sleep(60)\n"
    )
    words = [sys.executable, "-m", "lowtide", "run", str(script)]

    def listen() -> None:  # what runs in the background ignores interrupts, and so do its children
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    ended = subprocess.run(words, capture_output=True, text=True, env=os.environ, timeout=300, preexec_fn=listen)
    assert ended.returncode in (-signal.SIGINT, 128 + signal.SIGINT)
    assert ended.stderr.count("Traceback") == 1
    assert "Exception ignored" not in ended.stderr


def test_as_a_command(tmp_path: Path) -> None:
    """In a process of its own, with spawned workers."""
    script = tmp_path / "spawns.py"
    script.write_text(
        "import torch\n"
        "from torch import nn\n"
        "if __name__ == '__main__':\n"
        "    data = torch.utils.data.TensorDataset(torch.ones(64, 16))\n"
        "    loader = torch.utils.data.DataLoader(data, 32, num_workers=1, multiprocessing_context='spawn')\n"
        "    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)))\n"
        "    for (x,) in loader:\n"
        "        model(x).sum().backward()\n"
        "    print('trained')\n"
    )
    words = [sys.executable, "-m", "lowtide", "run", "--budget", "100%", str(script)]
    ended = subprocess.run(words, capture_output=True, text=True, env=os.environ, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "trained\n"
    assert "2 of 2" in ended.stderr


def test_what_a_script_leaves_running(tmp_path: Path) -> None:
    """Its threads train by plans to their end, beside a pool that nobody closed; they and functions for the end of the process
    find its classes, and these its arguments and the modules beside it."""
    script = tmp_path / "threads.py"
    script.write_text(
        "import atexit, concurrent.futures, pickle, sys, threading, torch\n"
        "from torch import nn\n"
        "class Net(nn.Sequential): pass\n"
        "model = Net(nn.Linear(8, 8), *(nn.Tanh() for _ in range(6)))\n"
        "def train():\n"
        "    threading.main_thread().join(0.5)\n"  # long enough for the script to end
        "    for _ in range(2):\n"
        "        model(torch.ones(512, 8)).sum().backward()\n"
        "    print(type(pickle.loads(pickle.dumps(model))).__name__)\n"
        "def end():\n"
        "    import beside\n"
        "    print(pickle.loads(pickle.dumps(Net())), beside.WHEN, *sys.argv[1:])\n"
        "atexit.register(end)\n"
        "threading.Thread(target=train).start()\n"
        "concurrent.futures.ThreadPoolExecutor().submit(int)\n"
        "raise SystemExit(4)\n"
    )
    (tmp_path / "beside.py").write_text("WHEN = 'at the end'")
    command = [sys.executable, "-m", "lowtide", "run", "--budget", "80%", str(script), "--of", "it"]
    ended = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=300)
    assert ended.returncode == 4, ended.stderr
    assert ended.stdout.splitlines() == ["Net", "Net() at the end --of it"]
    assert "2 of 2" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_profilers_of_modules() -> None:
    """They look for a module in the variables of what stands in the place of its call."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    found = []
    with roots.Roots(lambda root, *_: found.append(root)), torch.profiler.profile(with_modules=True, with_stack=True):
        model(torch.randn(2, 4)).sum().backward()
    assert [root.kind for root in found] == ["Sequential"]


class _Inner(torch.autograd.Function):
    """Differentiates in its own backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, inner: nn.Module) -> torch.Tensor:
        ctx.x, ctx.inner = x.detach(), inner
        return x.sum()

    @staticmethod
    def backward(ctx: Any, *arrived: torch.Tensor) -> tuple[torch.Tensor, None]:
        with torch.enable_grad():
            kept = ctx.inner(ctx.x)
            kept.sum().backward()
            del kept
            large = torch.zeros(1 << 18)
        return large.sum() + torch.ones_like(ctx.x), None


class _Outer(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = _Inner.apply(self[0](x), self[1])
        return loss


def test_a_pass_ends_where_the_outermost_backward_does() -> None:
    model = _Outer(nn.Linear(4, 4), nn.Linear(4, 4))
    ended = list[int]()
    with roots.Roots(lambda root, *_: setattr(root, "outside", "watched"), lambda: ended.append(1)) as watched:
        for _ in range(2):
            model(torch.randn(2, 4)).backward()
    assert len(ended) == watched.passes == 2
    assert watched.peak_bytes > 1 << 20


class _CallsItself(nn.Module):
    """Computes its loss of a dictionary by a call of itself, and decides by the data, as detectors of Ultralytics do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32)) for _ in range(4)
        )

    def forward(self, x: Any) -> Any:
        if isinstance(x, dict):
            found, _ = self.forward(x["x"])
            return found.square().mean() * len(x["kinds"].unique())
        for block in self.blocks:
            x = x + block(x)
        return x, x.tanh()


def _trained(model: nn.Module) -> list[torch.Tensor]:
    for number in range(3):
        torch.manual_seed(number)
        model({"x": torch.randn(256, 32), "kinds": torch.rand(8) > 0.5}).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_a_model_that_calls_itself() -> None:
    """The inner call was planned as a whole, with parts for submodules, which were gone in the backward pass."""
    model = _CallsItself()
    expected = _trained(copy.deepcopy(model))
    with scripts.planned_roots({"budget": "70%"}, (), lambda text: None) as found:
        assert all(map(torch.equal, _trained(model), expected))
    assert [root.planned_calls for root in found.roots] == [3]
