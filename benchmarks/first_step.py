"""Time to the first planned step: ``python -m benchmarks.first_step``.

*starts*: every model is prepared at 50 % of its peak, in a process of its own, twice: *cold*, with no measured costs and no
plans on disk, and *cached*, with those that the cold start left. Without lowtide a step takes what stands under *plain*. With
Inductor (``--compilers eager,inductor``) a cold start has no compiled kernels on disk either. *compiled*: the first steps under
``torch.compile`` with PyTorch's own backend and with lowtide's, one after the other, cold. *shapes*: GPT-2 meets its second to
twentieth length.

Results take the place of earlier ones of the same kind, as they come; the others stay. The exit code is 1 where GPT-2 with 12
layers takes 30 s or more cold, or 5 s or more cached, from the call of ``rematerialize`` to the end of the first step, run
operator by operator.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import first_step_trials as trials
from benchmarks.first_step_trials import BACKENDS, COMPILED, DEEP, MODELS, Compiled, Shape, Start
from lowtide.stage_times import STAGES

RESULTS = Path(__file__).parent / "results"
MOST_SECONDS = {"cold": 30.0, "cached": 5.0}
_TRIALS: dict[str, Callable[..., Any]] = {
    "start": lambda *of: asdict(trials.start(*of)),
    "compiled": lambda *of: asdict(trials.compiled(*of)),
    "shapes": lambda: [asdict(each) for each in trials.shapes()],
}


@dataclass
class Found:
    """All that was measured. ``settings``: how, of each kind."""

    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    starts: list[Start] = field(default_factory=list)
    compiled: list[Compiled] = field(default_factory=list)
    shapes: list[Shape] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Found:
        """What was written to ``path``, if anything."""
        if not path.exists():
            return cls()
        kept = json.loads(path.read_text())
        return cls(
            kept["settings"],
            [Start(**each) for each in kept["starts"]],
            [Compiled(**each) for each in kept["compiled"]],
            [Shape(**each) for each in kept["shapes"]],
        )

    def write(self, path: Path) -> None:
        """As data, and as a page beside it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")
        path.with_suffix(".md").write_text(document(self))

    def add_start(self, new: Start) -> None:
        """In the place of an earlier one."""
        last = {(each.compiler, each.model, each.kind): each for each in [*self.starts, new]}
        kinds, models = list(MOST_SECONDS), list(MODELS)
        self.starts = sorted(
            last.values(), key=lambda one: (one.compiler, models.index(one.model), kinds.index(one.kind))
        )

    def add_compiled(self, new: Compiled) -> None:
        """In the place of an earlier one."""
        last = {(each.model, each.backend): each for each in [*self.compiled, new]}
        self.compiled = sorted(last.values(), key=lambda one: (COMPILED.index(one.model), BACKENDS.index(one.backend)))


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    if options.worker:
        name, *of = options.worker
        sys.stdout.write(json.dumps(_TRIALS[name](*of)) + "\n")
        return 0
    path = options.results / "first_step.json"
    found = Found.read(path)
    deep = []
    for kind in options.kinds.split(","):
        for each in {"starts": _starts, "compiled": _compiled, "shapes": _shapes}[kind](options):
            if isinstance(each, Start):
                found.add_start(each)
                deep += [each] if (each.model, each.compiler) == (DEEP, "eager") else []
            elif isinstance(each, Compiled):
                found.add_compiled(each)
            else:
                found.shapes = each
            found.settings[kind] = _setting(options)
            found.write(path)
    print(path.with_suffix(".md").read_text())
    broken = [each for each in deep if each.total >= MOST_SECONDS[each.kind]]
    for each in broken:
        print(f"{each.model} {each.kind}: {each.total:.1f} s, not under {MOST_SECONDS[each.kind]} s", file=sys.stderr)
    return 1 if broken else 0


def _setting(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "threads": options.threads,
        "load at the end": round(os.getloadavg()[0], 1),
    }


def _starts(options: argparse.Namespace) -> Iterator[Start]:
    for compiler in options.compilers.split(","):
        for model in _chosen(options, MODELS):
            with tempfile.TemporaryDirectory() as folder:
                for kind in MOST_SECONDS:
                    found = Start(**_worker(["start", model, compiler, kind], folder, options))
                    print(f"{model} {compiler} {kind}: {found.total:.1f} s", flush=True)
                    yield found


def _compiled(options: argparse.Namespace) -> Iterator[Compiled]:
    for model in _chosen(options, COMPILED):
        for backend in BACKENDS:
            with tempfile.TemporaryDirectory() as folder:
                found = Compiled(**_worker(["compiled", model, backend], folder, options))
            print(f"{model} {backend}: {sum(found.steps[:2]):.1f} s", flush=True)
            yield found


def _shapes(options: argparse.Namespace) -> Iterator[list[Shape]]:
    with tempfile.TemporaryDirectory() as folder:
        yield [Shape(**each) for each in _worker(["shapes"], folder, options)]


def _chosen(options: argparse.Namespace, models: Sequence[str] | dict[str, Any]) -> list[str]:
    asked = list(MODELS) if options.models == "all" else options.models.split(",")
    return [each for each in models if each in asked]


def _worker(trial: list[str], folder: str, options: argparse.Namespace) -> Any:
    """What a process says that finds its caches in ``folder``."""
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": str(options.threads),
        "LOWTIDE_CACHE_DIR": folder,
        "TORCHINDUCTOR_CACHE_DIR": str(Path(folder) / "inductor"),
    }
    command = [sys.executable, "-m", "benchmarks.first_step", "--worker", *trial]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.strip().split("\n")[-1])


def document(found: Found) -> str:
    """The Markdown page."""
    lines = ["# Time to the first step", "", "Made by `python -m benchmarks.first_step`. Seconds of wall time."]
    if found.starts:
        lines += ["", "## From `rematerialize` to the end of the first step", "", *_of_starts(found)]
    if found.shapes:
        lines += ["", "## Later shapes", "", *_of_shapes(found)]
    if found.compiled:
        lines += ["", "## Under torch.compile", "", *_of_compiled(found)]
    return "\n".join([*lines, ""])


def _as_set(found: Found, kind: str) -> str:
    return "(" + ", ".join(f"{key} {value}" for key, value in found.settings[kind].items()) + ")"


def _of_starts(found: Found) -> Iterator[str]:
    yield "A step of plain PyTorch, the stages of `rematerialize` at 50 % of the peak, the first step, and the sum of both"
    yield f"{_as_set(found, 'starts')}."
    yield "*cached*: costs, plan and compiled kernels are on disk from the cold start. The number of distinct kernels stands"
    yield "beside the seconds that they take. Rows stay until they are measured anew: those of Inductor are older than eager's."
    yield ""
    yield "| model | compiler | start | plain | " + " | ".join(STAGES) + " | first step | total |"
    yield "|---|---|---|" + "---:|" * (len(STAGES) + 3)
    for each in found.starts:
        stages = {name: f"{seconds:.2f}" for name, seconds in each.stages.items()}
        if "kernels" in stages:
            stages["kernels"] += f" ({each.kernels})"
        cells = [each.model, each.compiler, each.kind, f"{each.plain:.2f}", *(stages.get(name, "") for name in STAGES)]
        yield f"| {' | '.join(cells)} | {each.first_step:.2f} | {each.total:.2f} |"


def _of_shapes(found: Found) -> Iterator[str]:
    waits = [each.first - each.later for each in found.shapes[2:]]
    steps = statistics.median(each.later for each in found.shapes[2:])
    yield "The GPT-2 of above, rematerialized for its longest text, meets others: the first step at each length, the quickest"
    yield f"of three later ones, with default settings {_as_set(found, 'shapes')}."
    yield "The second length is captured by itself, the third with symbolic sizes. From the fourth on, the first step takes"
    yield f"{statistics.median(waits[1:]):.2f} s more (median; most {max(waits[1:]):.2f} s), where a step takes {steps:.2f} s."
    yield ""
    yield "| | length | first step | later |"
    yield "|---:|---:|---:|---:|"
    for each in found.shapes:
        yield f"| {each.number} | {each.length} | {each.first:.2f} | {each.later:.2f} |"


def _of_compiled(found: Found) -> Iterator[str]:
    yield "Models with dropout, nothing on disk, at a budget of 50 % with lowtide's backend"
    yield f"{_as_set(found, 'compiled')}. *plans*: how many were made, one per graph of Dynamo's and kind of call."
    yield ""
    yield "| model | backend | first step | second | third | first two | over PyTorch's own | plans |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|"
    own = {each.model: sum(each.steps[:2]) for each in found.compiled if each.backend == BACKENDS[0]}
    for each in found.compiled:
        two = sum(each.steps[:2])
        over = f"{two / own[each.model]:.2f}" if each.model in own else ""
        steps = " | ".join(f"{seconds:.2f}" for seconds in each.steps)
        yield f"| {each.model} | {each.backend} | {steps} | {two:.1f} | {over} | {each.plans} |"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_step", description=__doc__)
    parser.add_argument("--kinds", default="starts,compiled,shapes", help="which of the three; default: all")
    parser.add_argument("--models", default="all", help=f'"all" or some of {",".join(MODELS)}')
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="default: all cores")
    parser.add_argument("--compilers", default="eager", help='"eager", "inductor" or "eager,inductor"')
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--worker", nargs="+", metavar="TRIAL", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
