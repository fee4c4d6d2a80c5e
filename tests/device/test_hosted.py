"""Everything that asks a device is run on one that is not the CPU, on any machine: see ``hosted.cpp`` and ``on_hosted.py``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.device import hosted

_ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(hosted.missing() is not None, reason=hosted.missing() or "")
@pytest.mark.parametrize("kind", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_on_hosted(kind: str) -> None:
    """In a process of its own, since every test after it in this one would have the accelerator too."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--show-capture=no", "-m", kind]
    ran = subprocess.run(
        [*command, "-o", "python_files=*on_hosted.py", "tests/device"],
        cwd=_ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
