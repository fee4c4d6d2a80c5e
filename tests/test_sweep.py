"""Architectures that nobody here wrote, in ``make test-all``: a few at two budgets, all of them at four."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("diffusers")

from benchmarks.models import MODELS, QUICK
from benchmarks.sweep import RESULTS, main, parse_options, problems, run_in_fresh_process


def _assert_good(name: str, arguments: list[str], results: Path) -> None:
    rows = run_in_fresh_process(name, parse_options([*arguments, "--results", str(results)]))
    complaints = [f"{row.asked}: {problem}" for row in rows for problem in problems(row)]
    assert not complaints, "\n".join([name, *complaints])


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_quick(name: str, tmp_path: Path) -> None:
    _assert_good(name, ["--budgets", "60%,35%", "--timings", "1", "--planner", "auto{effort=1}"], tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", MODELS)
def test_all_models(name: str) -> None:
    """Writes ``benchmarks/results/sweep/NAME.json`` and makes the table anew."""
    assert main(["--models", name, "--results", os.environ.get("LOWTIDE_RESULTS_DIR", str(RESULTS))]) == 0
