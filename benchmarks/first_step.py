"""Time to the first planned step, stage by stage: ``python -m benchmarks.first_step``.

Every model is prepared at 50 % of its peak, in a process of its own, twice: *cold*, with no measured costs and no plans on
disk, and *cached*, with those that the cold start left. Without lowtide a step takes what
stands under *plain*. With Inductor (``--compilers eager,inductor``) a cold start has no compiled kernels on disk either.
Results take the place of earlier ones of the same model and compiler, as they come; the others stay. The exit code is 1 where
GPT-2 with 12 layers takes 30 s or more cold, or 5 s or more cached, from the call of ``rematerialize`` to the end of the first
step, run operator by operator.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import lowtide
from benchmarks.compare.models import SMALL
from benchmarks.graph_models import GRAPH_MODELS
from benchmarks.zoo import Sample, loss_of
from lowtide.stage_times import STAGES, stage_seconds

RESULTS = Path(__file__).parent / "results"
DEEP = "gpt2_12"
MOST_SECONDS = {"cold": 30.0, "cached": 5.0}
MODELS: dict[str, Callable[[], Sample]] = {
    DEEP: GRAPH_MODELS[DEEP],
    **{name: compared.sample for name, compared in SMALL.items()},
}


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds of wall time; ``stages`` by name, ``prepare`` all of them with what lies between. ``kernels``: distinct ones."""

    model: str
    compiler: str
    kind: str
    kernels: int
    plain: float
    stages: dict[str, float]
    prepare: float
    first_step: float

    @property
    def total(self) -> float:
        return self.prepare + self.first_step


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    if options.worker:
        sys.stdout.write(json.dumps(asdict(start(*options.worker))) + "\n")
        return 0
    chosen = list(MODELS) if options.models == "all" else options.models.split(",")
    path = options.results / "first_step.json"
    known = [Start(**each) for each in json.loads(path.read_text())["starts"]] if path.exists() else []
    found: list[Start] = []
    for compiler in options.compilers.split(","):
        for model in chosen:
            found += _starts(model, compiler, options)
            _write(path, _ordered([*known, *found]), options)
    print(path.with_suffix(".md").read_text())
    deep = [each for each in found if (each.model, each.compiler) == (DEEP, "eager")]
    broken = [each for each in deep if each.total >= MOST_SECONDS[each.kind]]
    for each in broken:
        print(f"{each.model} {each.kind}: {each.total:.1f} s, not under {MOST_SECONDS[each.kind]} s", file=sys.stderr)
    return 1 if broken else 0


def _ordered(starts: Sequence[Start]) -> list[Start]:
    """The last of each model, compiler and kind."""
    last = {(each.compiler, each.model, each.kind): each for each in starts}
    kinds, models = list(MOST_SECONDS), list(MODELS)
    return sorted(last.values(), key=lambda each: (each.compiler, models.index(each.model), kinds.index(each.kind)))


def _write(path: Path, starts: Sequence[Start], options: argparse.Namespace) -> None:
    setting = {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "threads": options.threads,
        "load at the end": round(os.getloadavg()[0], 1),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"setting": setting, "starts": [asdict(each) for each in starts]}, indent=1) + "\n")
    path.with_suffix(".md").write_text(document(starts, setting))


def start(model: str, compiler: str, kind: str) -> Start:
    """Prepare the model and take a step; in a fresh process, whose caches are those of the environment."""
    module, args, kwargs = MODELS[model]()
    loss_of(module(*args, **kwargs)).backward()  # what eager itself makes once
    plain = _timed(lambda: loss_of(module(*args, **kwargs)).backward())
    with stage_seconds() as stages:
        prepare = _timed(lambda: lowtide.rematerialize(module, args, kwargs, budget="50%", compiler=compiler))
    first_step = _timed(lambda: loss_of(module(*args, **kwargs)).backward())
    lowtide.wait(module)  # the plan is kept for the cached start
    targets = {op.target for op in lowtide.plans(module)[0].graph.ops}
    kernels = sum(target.startswith("lowtide.fused_") for target in targets)
    return Start(model, compiler, kind, kernels, plain, stages, prepare, first_step)


def _timed(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _starts(model: str, compiler: str, options: argparse.Namespace) -> list[Start]:
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": str(options.threads),
            "LOWTIDE_CACHE_DIR": folder,
            "TORCHINDUCTOR_CACHE_DIR": str(Path(folder) / "inductor"),
        }
        found = []
        for kind in MOST_SECONDS:
            command = [sys.executable, "-m", "benchmarks.first_step", "--worker", model, compiler, kind]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            found.append(Start(**json.loads(done.stdout.strip().split("\n")[-1])))
            print(f"{model} {compiler} {kind}: {found[-1].total:.1f} s", flush=True)
    return found


def document(starts: Sequence[Start], setting: dict[str, object]) -> str:
    """The Markdown table."""
    lines = [
        "# Time to the first step",
        "",
        "Made by `python -m benchmarks.first_step`; "
        + ", ".join(f"{key} {value}" for key, value in setting.items())
        + ".",
        "",
        "Seconds of wall time: a step of plain PyTorch, the stages of `rematerialize` at 50 % of the peak, the first step, and",
        "the sum of both. *cached*: costs, plan and compiled kernels are on disk from the cold start. The number of distinct",
        "kernels stands beside the seconds that they take.",
        "",
        "| model | compiler | start | plain | " + " | ".join(STAGES) + " | first step | total |",
        "|---|---|---|" + "---:|" * (len(STAGES) + 3),
    ]
    for each in starts:
        stages = {name: f"{seconds:.2f}" for name, seconds in each.stages.items()}
        if "kernels" in stages:
            stages["kernels"] += f" ({each.kernels})"
        cells = [each.model, each.compiler, each.kind, f"{each.plain:.2f}", *(stages.get(name, "") for name in STAGES)]
        lines.append(f"| {' | '.join(cells)} | {each.first_step:.2f} | {each.total:.2f} |")
    return "\n".join([*lines, ""])


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_step", description=__doc__)
    parser.add_argument("--models", default="all", help=f'"all" or some of {",".join(MODELS)}')
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="default: all cores")
    parser.add_argument("--compilers", default="eager", help='"eager", "inductor" or "eager,inductor"')
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--worker", nargs=3, metavar=("MODEL", "COMPILER", "KIND"), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
