"""The package as users get it: built, installed into an environment of its own, and used there without the source tree."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from lowtide.extras import EXTRAS
from tests.support.chains import chain_dag

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

_SMOKE = """
import lowtide, sys
from pathlib import Path
assert Path(lowtide.__file__).is_relative_to(sys.prefix), lowtide.__file__
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.1)) for _ in range(6)))
x = torch.randn(1024, 64)

def step():
    torch.manual_seed(1)
    model.zero_grad(set_to_none=True)
    model(x).sum().backward()

step()
gradients = [p.grad.clone() for p in model.parameters()]
lowtide.rematerialize(model, (x,), budget="60%", planner="auto{effort=1}")
step()
assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients))
lowtide.plans(model)[0].report("plan.html")
"""

_USER = """
from typing import assert_type

import torch
from torch import nn

import lowtide


class Net(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu()


net = Net()
x = torch.randn(4)
assert_type(lowtide.rematerialize(net, (x,), budget="8GiB", on_new_signature="eager"), Net)
assert_type(lowtide.restore(net), Net)
plan = lowtide.plan(net, (x,), budget=1 << 30)
assert_type(plan, lowtide.Plan)
assert_type(lowtide.plans(net), list[lowtide.Plan])
assert_type(plan.overhead, float)
assert_type(plan.curve(points=4).minimum_bytes, int)
measurement = lowtide.measure(net, x)
assert_type(measurement, lowtide.Measurement)
assert_type(measurement.peak_bytes, int)
plan.report("plan.html", measurement)
with lowtide.online(budget="2GiB", heuristic="lru") as session:
    net(x)
assert_type(session.statistics.evictions, int)
try:
    lowtide.Plan.load("plan.json").save("copy.json")
except lowtide.InfeasibleBudgetError as error:
    assert_type(error.minimum_bytes, int)
lowtide.plan(net, (x,), budget=None)  # type: ignore[arg-type]
"""


def test_extras_are_those_that_errors_name() -> None:
    extras = PROJECT["optional-dependencies"]
    for package, extra in EXTRAS.items():
        assert any(line.startswith(package.replace("_", "-")) for line in extras[extra]), (package, extra)
    assert all(name in extras["all"][0] for name in set(EXTRAS.values()))


def test_importing_is_light() -> None:
    """Neither torch nor anything optional comes with the name alone."""
    code = "import sys, lowtide; print([m for m in sys.argv[1:] if m in sys.modules])"
    command = [sys.executable, "-c", code, "torch", "scipy", *EXTRAS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution, and the wheel made from it."""
    if importlib.util.find_spec("build") is None:
        pytest.skip("the package build is not installed")
    folder = tmp_path_factory.mktemp("dist")
    _run([sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)], folder)
    return folder


@pytest.fixture(scope="module")
def python(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment with the wheel; what the wheel depends on is seen in ours."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    interpreter = folder / "bin" / "python"
    (wheel,) = built.glob("*.whl")
    _run([str(interpreter), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)], folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return interpreter


def _run(command: list[str], folder: Path, environment: Mapping[str, str] = os.environ) -> str:
    kept = {key: value for key, value in environment.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=kept, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_contents(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    ours = {name.removeprefix("lowtide/") for name in names if name.startswith("lowtide/")}
    sources = (ROOT / "src" / "lowtide").rglob("*")
    expected = {str(p.relative_to(ROOT / "src" / "lowtide")) for p in sources if p.is_file() and p.suffix != ".pyc"}
    assert ours == expected
    assert {"py.typed", "report/templates/report.html"} <= ours
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tops = {name.split("/")[1] for name in tar.getnames() if "/" in name}
    assert {"src", "tests", "docs", "README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml"} <= tops


@pytest.mark.slow
def test_installed(python: Path, tmp_path: Path) -> None:
    (tmp_path / "smoke.py").write_text(_SMOKE)
    (tmp_path / "chain.json").write_text(json.dumps(chain_dag()))
    environment = {**os.environ, "LOWTIDE_CACHE_DIR": str(tmp_path / "cache")}
    _run([str(python), "smoke.py"], tmp_path, environment)
    assert (tmp_path / "plan.html").stat().st_size > 10_000
    lowtide = str(python.parent / "lowtide")
    assert PROJECT["name"] in _run([lowtide, "--version"], tmp_path)
    solved = json.loads(_run([lowtide, "solve", "chain.json", "--budget", "70%", "--json"], tmp_path))
    assert solved["peak_bytes"] <= solved["budget_bytes"]


@pytest.mark.slow
def test_types_from_outside(python: Path, tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(_USER)
    options = ["--strict", "--python-executable", str(python), "--cache-dir", str(tmp_path / "cache")]
    assert "no issues found" in _run([sys.executable, "-m", "mypy", *options, "user.py"], tmp_path)
