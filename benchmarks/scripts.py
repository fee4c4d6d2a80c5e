"""Training scripts as others wrote them, with and without ``lowtide run``: ``python -m benchmarks.scripts FOLDER``.

FOLDER holds ``nanoGPT`` (github.com/karpathy/nanoGPT) and ``pytorch-examples`` (github.com/pytorch/examples), which are copied
to a temporary folder and not edited; data sets are made there, of random images and words in the format that a script reads.
Each script runs three times: by ``python`` alone, by ``lowtide run --budget``, and by ``lowtide run`` with its models left
alone, which measures the passes. What the first two print is compared after times have been taken out. Scripts that run on for
ever are interrupted after some lines. Those of torchvision need it installed (``--path`` adds a folder to where Python looks).
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import pickle
import platform
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

RESULTS = Path(__file__).parent / "results"
OWN = Path(__file__).parents[1] / "tests" / "cli" / "scripts"
_TIMES = re.compile(
    r"time:? +[\d.]+ ?m?s|ms/batch +[\d.]+|(Time|Data) +[\d.]+ \( *[\d.]+\)|, mfu -?[\d.]+%|\w*(runtime|per_second)': '?[\d.]+"
)


@dataclass(frozen=True)
class Script:
    """``folder`` below FOLDER, or this project's own; ``words`` to run there. ``models``: classes that it trains. ``lines``:
    after how many it is interrupted. ``exact``: whether what it prints is to be the same."""

    name: str
    folder: str
    words: tuple[str, ...]
    models: tuple[str, ...]
    prepare: Callable[[Path], None] = lambda folder: None
    lines: int | None = None
    exact: bool = True
    budget: str = "60%"


def _tokens(folder: Path) -> None:
    data = folder / "data" / "shakespeare_char"
    random = np.random.default_rng(0)
    for name in ("train", "val"):
        random.integers(0, 65, 20_000, dtype=np.uint16).tofile(data / f"{name}.bin")
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 65}))


def _words(folder: Path) -> None:
    data, random = folder / "data" / "wikitext-2", np.random.default_rng(0)
    data.mkdir(parents=True)
    for name, lines in (("train", 900), ("valid", 60), ("test", 60)):
        text = [" ".join(f"w{word}" for word in random.integers(0, 1000, 20)) for _ in range(lines)]
        (data / f"{name}.txt").write_text("\n".join(text) + "\n")


def _digits(folder: Path) -> None:
    """MNIST's four files, of random images: 2500 to train with, so that the last batch is short, and 1024 to test with."""
    raw, random = folder.parent / "data" / "MNIST" / "raw", np.random.default_rng(0)
    (folder / "results").mkdir(exist_ok=True)
    raw.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", 2500), ("t10k", 1024)):
        files = {
            "images-idx3-ubyte": struct.pack(">4i", 2051, count, 28, 28) + random.bytes(count * 784),
            "labels-idx1-ubyte": struct.pack(">2i", 2049, count) + bytes(random.integers(0, 10, count).tolist()),
        }
        for kind, content in files.items():
            (raw / f"{name}-{kind}").write_bytes(content)
            (raw / f"{name}-{kind}.gz").write_bytes(gzip.compress(content))


_GPT = (
    "train.py", "config/train_shakespeare_char.py", "--device=cpu", "--eval_iters=2", "--eval_interval=5", "--log_interval=1",
    "--block_size=128", "--batch_size=8", "--n_layer=4", "--n_head=4", "--n_embd=128", "--max_iters=10", "--lr_decay_iters=10",
    "--gradient_accumulation_steps=2", "--always_save_checkpoint=True",
)  # fmt: skip
_LANGUAGE = ("main.py", "--epochs=2", "--log-interval=5", "--dropout=0.2")
_IMAGES = ("main.py", "--dummy", "--seed=0", "-p=1", "-b=8", "-j=2", "--lr=0.01")
SCRIPTS = (
    Script("nanoGPT", "nanoGPT", (*_GPT, "--compile=False"), ("GPT",), _tokens),
    Script(
        "nanoGPT, compiled, no dropout", "nanoGPT",
        (*_GPT, "--compile=True", "--dropout=0.0"), ("GPT",), _tokens, exact=False,
    ),
    Script(
        "word_language_model, Transformer", "pytorch-examples/word_language_model",
        (*_LANGUAGE, "--model=Transformer", "--lr=1"), ("TransformerModel",), _words,
    ),
    Script(
        "word_language_model, LSTM", "pytorch-examples/word_language_model",
        (*_LANGUAGE, "--model=LSTM"), ("RNNModel",), _words, budget="80%",
    ),
    Script("mnist", "pytorch-examples/mnist", ("main.py", "--epochs=2"), ("Net",), _digits, budget="90%"),
    Script("vae", "pytorch-examples/vae", ("main.py", "--epochs=2", "--batch-size=1024"), ("VAE",), _digits, budget="90%"),
    Script("imagenet, resnet18", "pytorch-examples/imagenet", (*_IMAGES, "-a=resnet18"), ("ResNet",), lines=8),
    Script("imagenet, vit_b_16", "pytorch-examples/imagenet", (*_IMAGES, "-a=vit_b_16"), ("VisionTransformer",), lines=6),
    Script("transformers' Trainer", "", ("trainer.py",), ("GPT2LMHeadModel",)),
    Script("Lightning", "", ("lightning.py",), ("Sequential", "Linear")),
    Script("a generator and a discriminator", "", ("-m", "package.gan", "--steps", "8"), ("Generator", "Discriminator"),
           budget="80%"),
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """``same``: whether both printed the same but for times. Bytes of the highest pass, as measured, and what was planned."""

    script: str
    budget: str
    same: bool
    exact: bool
    code: int
    lines: int
    models: list[dict[str, object]]
    plain_peak_bytes: int
    peak_bytes: int
    plain_seconds: float
    seconds: float
    difference: str


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--path", default="", help="folders to add to PYTHONPATH, in front")
    parser.add_argument("--only", default="", help="part of the names of those to run")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # which jobs in a shell's background ignore, and their children
    path = options.results / "scripts.json"
    known = {each["script"]: each for each in json.loads(path.read_text())["scripts"]} if path.exists() else {}
    wrong = 0
    for script in (script for script in SCRIPTS if options.only in script.name):
        with tempfile.TemporaryDirectory() as temporary:
            found = outcome(script, options.folder, Path(temporary), options.path)
        wrong += script.exact and not found.same
        known[script.name] = asdict(found)
        print(json.dumps(known[script.name]), flush=True)
        _write(path, [known[each.name] for each in SCRIPTS if each.name in known])
    return 1 if wrong else 0


def outcome(script: Script, source: Path, temporary: Path, path: str) -> Outcome:
    """Run ``script`` in three copies of its folder."""
    environment = os.environ | {"LOWTIDE_CACHE_DIR": str(temporary / "cache")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (path, os.environ.get("PYTHONPATH", ""))))
    left_alone = [word for model in script.models for word in ("--skip", model)]
    report, plain_report = temporary / "run.json", temporary / "plain.json"
    prefixes = (
        (),
        ("-m", "lowtide", "run", "--budget", script.budget, "--report", str(report)),
        ("-m", "lowtide", "run", *left_alone, "--report", str(plain_report)),
    )
    runs = []
    for index, prefix in enumerate(prefixes):
        folder = temporary / str(index) / "examples" / (script.folder or "own")
        shutil.copytree(source / script.folder if script.folder else OWN, folder)
        script.prepare(folder)
        runs.append(_run((*prefix, *script.words), folder, environment, script.lines))
    (plain, seconds, code), (planned, planned_seconds, planned_code), _ = runs
    place = f"{temporary / '1' / 'examples'}{os.sep}"
    summary, watched = json.loads(report.read_text().replace(place, "")), json.loads(plain_report.read_text())
    pairs = zip(plain, planned, strict=False)
    differ = next((f"{a} | {b}" for a, b in pairs if a != b), "" if len(plain) == len(planned) else "another length")
    return Outcome(
        script.name, script.budget, not differ and code == planned_code, script.exact, planned_code, len(plain),
        summary["models"], watched["peak_bytes"], summary["peak_bytes"], round(seconds, 1), round(planned_seconds, 1), differ,
    )  # fmt: skip


def _run(
    words: Sequence[str], folder: Path, environment: dict[str, str], lines: int | None
) -> tuple[list[str], float, int]:
    """What was printed, without times; seconds; the exit code. Ended after so many ``lines`` as from the keyboard."""
    began, printed = time.monotonic(), []
    with (folder / "errors.txt").open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-u", *words],
            cwd=folder,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        assert process.stdout is not None
        for line in process.stdout:
            if lines is None or len(printed) < lines:
                printed.append(_TIMES.sub("", line.rstrip()))
            if len(printed) == lines:
                process.send_signal(signal.SIGINT)
                lines = 0
        code = process.wait()
    if code not in (0, -signal.SIGINT, 128 + signal.SIGINT):
        print((folder / "errors.txt").read_text()[-3000:], file=sys.stderr)
    return printed, time.monotonic() - began, 0 if lines == 0 else code


def _write(path: Path, found: list[dict[str, object]]) -> None:
    facts = {"torch": torch.__version__, "machine": platform.machine(), "threads": torch.get_num_threads()}
    path.write_text(json.dumps(facts | {"scripts": found}, indent=1) + "\n")
    rows = [
        "# Unchanged training scripts", "",
        "Made by `python -m benchmarks.scripts`; " + ", ".join(f"{name} {value}" for name, value in facts.items()) + ".", "",
        "*same*: everything that the script prints, times aside (*close*: compiled kernels). Peaks are of the highest forward",
        "and backward pass, with a loss outside of the model, in MiB: measured without a plan and with it. *planned*, and its",
        "overhead, are predictions for the largest pass. Seconds are of the whole process by the wall clock, on a machine that",
        "others used as well; with *run*, making plans is included. A percentage is of the predicted peak, for a caller that",
        "keeps outputs, and the gradients that it hands in: where a script does not (vae), a plain pass takes less than that.",
        "", "| script | budget | same | without | with | planned | overhead | calls by a plan | outside | seconds | with run |",
        "|---|---|---|---:|---:|---:|---:|---:|---|---:|---:|",
    ]  # fmt: skip
    path.with_suffix(".md").write_text("\n".join([*rows, *map(_row, found)]) + "\n")


def _row(found: dict) -> str:  # type: ignore[type-arg]
    models = found["models"]
    largest = max(models, key=lambda model: model["unconstrained_peak_bytes"] or 0)
    planned, calls = sum(model["planned_calls"] for model in models), sum(model["calls"] for model in models)
    mib = [f"{(value or 0) / 2**20:.2f}" for value in (found["plain_peak_bytes"], found["peak_bytes"])]
    same = "yes" if found["same"] else ("no" if found["exact"] else "close")
    outside = "; ".join(f"{model['model']}: {model['outside'].split('. ')[0]}" for model in models if model["outside"])
    overhead = "-" if largest["overhead_percent"] is None else f"{largest['overhead_percent']:.1f} %"
    cells = (
        found["script"], found["budget"], same, *mib, f"{(largest['planned_peak_bytes'] or 0) / 2**20:.2f}", overhead,
        f"{planned} of {calls}", outside, f"{found['plain_seconds']:.1f}", f"{found['seconds']:.1f}",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
