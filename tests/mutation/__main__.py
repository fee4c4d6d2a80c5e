"""Change the sources one small thing at a time and see whether a test notices: ``python -m tests.mutation``.

Works in a copy of the tree; the tree itself is never written to. The sample is drawn by ``--seed``, evenly over the regions
(see ``tests.mutation.regions``), so the same tree, seed and number give the same mutants. What no test noticed is printed
and written as a table; ``docs/testing.md`` says what is known about such survivors.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

from tests.mutation.mutants import Mutant, mutants_of
from tests.mutation.regions import REGIONS, Region

ROOT = Path(__file__).parents[2]
_LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", "_build", "*.egg-info", ".hypothesis")
_LEAST_SECONDS = 60  # of processor time, whatever else the machine does
_WAITING = 20  # times as long by the clock: a mutant may wait for ever too
_LIMITED = """
import resource, sys, pytest
seconds = int(sys.argv.pop(1))
if seconds:
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
sys.exit(pytest.main(sys.argv[1:]))
"""


@dataclass(frozen=True, slots=True)
class Verdict:
    mutant: Mutant
    region: Region
    noticed_by: str  # empty for a survivor


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("--mutants", type=int, default=40, help="how many are tried")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--region", action="append", choices=[region.name for region in REGIONS], help="only this one")
    parser.add_argument("--workers", type=int, default=1, help="how many at a time, each in a copy of its own")
    parser.add_argument("--output", type=Path, help="where the table of survivors is written")
    parser.add_argument(
        "--least", type=float, default=0.0, help="the share that must be noticed, or the exit code is 1"
    )
    asked = parser.parse_args(arguments)
    regions = [region for region in REGIONS if not asked.region or region.name in asked.region]
    sample = drawn(regions, asked.mutants, asked.seed)
    with tempfile.TemporaryDirectory(prefix="lowtide-mutation-") as folder:
        verdicts = _judge(sample, Path(folder), asked.workers)
    text = table(verdicts)
    sys.stdout.write(text)
    if asked.output:
        asked.output.write_text(text)
    noticed = sum(bool(verdict.noticed_by) for verdict in verdicts)
    return 0 if noticed >= asked.least * len(verdicts) else 1


def drawn(regions: Sequence[Region], count: int, seed: int) -> list[tuple[Mutant, Region]]:
    """``count`` mutants: the regions take turns, and within a region every possible mutant is as likely."""
    draw = random.Random(seed)
    decks = []
    for region in regions:
        deck = [mutant for path in region.sources(ROOT) for mutant in mutants_of(path)]
        draw.shuffle(deck)
        decks.append([(mutant, region) for mutant in deck])
    turns = [pair for turn in range(max(map(len, decks))) for deck in decks for pair in deck[turn : turn + 1]]
    return turns[:count]


def table(verdicts: Sequence[Verdict]) -> str:
    """Counts by region, and every survivor."""
    lines = ["| region | mutants | noticed |", "| --- | --- | --- |"]
    for name in dict.fromkeys(verdict.region.name for verdict in verdicts):
        found = [bool(verdict.noticed_by) for verdict in verdicts if verdict.region.name == name]
        lines.append(f"| {name} | {len(found)} | {sum(found)} |")
    lines += ["", "| survivor | before | after |", "| --- | --- | --- |"]
    for verdict in verdicts:
        if not verdict.noticed_by:
            mutant = verdict.mutant
            place = f"{mutant.path.relative_to(ROOT)}:{mutant.line}"
            before, after = (text.replace("|", "\\|") for text in (mutant.before, mutant.after))
            lines.append(f"| {place} | `{before}` | `{after}` |")
    return "\n".join(lines) + "\n"


def _judge(sample: Sequence[tuple[Mutant, Region]], folder: Path, workers: int) -> list[Verdict]:
    copies: Queue[_Copy] = Queue()
    for number in range(workers):
        copies.put(_Copy(folder / str(number)))

    def judge(pair: tuple[Mutant, Region]) -> Verdict:
        own = copies.get()
        try:
            began = time.monotonic()
            verdict = own.judge(*pair)
            place = f"{pair[0].path.relative_to(ROOT)}:{pair[0].line}"
            outcome = verdict.noticed_by or "SURVIVED"
            sys.stderr.write(f"{place} {pair[0].after}: {outcome} ({time.monotonic() - began:.0f} s)\n")
            return verdict
        finally:
            copies.put(own)

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(judge, sample))


class _Copy:
    """A copy of the tree in which one file at a time is changed, and the processor time of each test there unchanged."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.seconds: dict[str, float] = {}
        for name in ("src", "tests", "benchmarks", "examples", "docs"):
            shutil.copytree(ROOT / name, root / name, ignore=_LEFT_OUT)
        for name in ("pyproject.toml", "README.md", "Makefile", "CHANGELOG.md", "LICENSE", "constraints.txt"):
            shutil.copy2(ROOT / name, root / name)

    def judge(self, mutant: Mutant, region: Region) -> Verdict:
        path = self.root / mutant.path.relative_to(ROOT)
        for test in region.tests:
            limit = self._limit(test)
            try:
                path.write_text(mutant.source())
                passes, _ = self._passes(test, limit)
            finally:
                shutil.copy2(mutant.path, path)
            if not passes:
                return Verdict(mutant, region, test)
        return Verdict(mutant, region, "")

    def _limit(self, test: str) -> int:
        """Seconds after which a test counts as failed; a mutant may well never end."""
        if test not in self.seconds:
            passes, self.seconds[test] = self._passes(test, 0)
            if not passes:
                raise RuntimeError(f"{test} fails without any change")
        return max(_LEAST_SECONDS, int(4 * self.seconds[test]))

    def _passes(self, test: str, limit: int) -> tuple[bool, float]:
        """Whether it does, and its seconds. ``limit`` 0 is none."""
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.root / "src"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow", "-o", "timeout=0"]
        began = _children_seconds()
        try:
            ended = subprocess.run(
                [sys.executable, "-c", _LIMITED, str(limit), *options, test],
                cwd=self.root, env=environment, capture_output=True, timeout=_WAITING * limit or None, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return False, _children_seconds() - began
        return ended.returncode == 0, _children_seconds() - began


def _children_seconds() -> float:
    """Processor time of ended children, those of other workers included: a limit is a little high at worst."""
    times = os.times()
    return times.children_user + times.children_system


if __name__ == "__main__":
    sys.exit(main())
