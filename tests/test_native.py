"""The compiled extension: built for this package or refused in one line; what it is given is checked."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import lowtide
from lowtide.errors import NativeCoreError
from lowtide.native import check_built_for, core
from lowtide.solve.model.compact import compact, encode_keep_all
from lowtide.version import NATIVE_INTERFACE, __version__
from tests.solve.small_graphs import chain

ROOT = Path(__file__).parent.parent
_USE = "import lowtide.solve.model.sweep"


def _ends_in_one_line(environment: dict[str, str]) -> str:
    """The last line of the error that the package's first use of its extension ends in."""
    done = subprocess.run(
        [sys.executable, "-c", _USE], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    return done.stderr.strip().splitlines()[-1]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package with its extension, first on the path."""
    shutil.copytree(Path(lowtide.__file__).parent, tmp_path / "lowtide", ignore=shutil.ignore_patterns("__pycache__"))
    if not any((tmp_path / "lowtide").glob("_native.[!p]*")):
        shutil.copy2(str(core.__file__), tmp_path / "lowtide")
    return tmp_path / "lowtide"


def test_an_extension_of_another_version_is_refused(package: Path) -> None:
    version = package / "version.py"
    version.write_text(version.read_text().replace(f'"{__version__}"', '"99.0.0"'))
    said = _ends_in_one_line({"PYTHONPATH": str(package.parent)})
    assert said.startswith("lowtide.errors.NativeCoreError: ")
    assert f"was built for lowtide {__version__} (interface {NATIVE_INTERFACE}), not for this lowtide 99.0.0" in said
    assert "pip install --force-reinstall" in said


def test_a_missing_extension_says_what_to_install(package: Path) -> None:
    for path in package.glob("_native.[!p]*"):
        path.unlink()
    said = _ends_in_one_line({"PYTHONPATH": str(package.parent)})
    assert said.startswith(f"lowtide.errors.NativeCoreError: lowtide {__version__} cannot load its compiled core")
    assert "C++20 compiler" in said


def test_another_interface_is_refused() -> None:
    check_built_for(__version__, NATIVE_INTERFACE, "here")
    with pytest.raises(NativeCoreError, match=f"interface {NATIVE_INTERFACE + 1}"):
        check_built_for(__version__, NATIVE_INTERFACE + 1, "here")


def test_no_compiler(tmp_path: Path) -> None:
    """The build ends in advice on what to install."""
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if cmake is None:
        pytest.skip("CMake is not installed")
    command = [cmake, "-S", str(ROOT / "native"), "-B", str(tmp_path)]
    nowhere = {**os.environ, "CXX": "/nowhere/c++"}
    done = subprocess.run(command, env=nowhere, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "needs a C++20 compiler" in done.stderr and "apt install g++" in done.stderr


def test_arrays_of_other_types_are_refused() -> None:
    model = compact(*chain(4))
    codes = encode_keep_all(model)
    core.sweep(model, codes)
    for wrong in (codes.astype(np.int64), codes.astype(np.float64), codes[::-1], [1, 2]):
        with pytest.raises(TypeError):
            core.sweep(model, wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        core.sweep(model._replace(time_ns=model.time_ns.astype(np.float64)), codes)  # type: ignore[arg-type]
