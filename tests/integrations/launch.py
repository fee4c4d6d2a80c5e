"""Programs of several processes: started by ``torchrun`` on a free port, each asserting by itself."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_SECONDS = 540


def torchrun(module: str, *arguments: str, processes: int = 2) -> str:
    """Run ``python -m module arguments`` in ``processes`` processes; returns what they printed, fails where one failed."""
    return launched(
        "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m", module, *arguments
    )  # fmt: skip


def launched(launcher: str, *arguments: str) -> str:
    """Run ``python -m launcher arguments``, which starts processes; returns what they printed, fails where one failed."""
    code, output = ended(launcher, *arguments)
    assert code == 0, output
    return output


def ended(launcher: str, *arguments: str, **variables: str) -> tuple[int, str]:
    """The same whether one failed or not: the exit code, and what they printed. ``variables``: of their environment."""
    path = os.pathsep.join([str(_ROOT / "src"), str(_ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **variables}
    process = subprocess.Popen(
        [sys.executable, "-m", launcher, *arguments],
        cwd=_ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        process.terminate()  # the launcher ends its processes
        output, _ = process.communicate()
        raise AssertionError(f"{launcher} {arguments} took more than {_SECONDS} s:\n{output}") from None
    return process.returncode, output


def ranks_of(module: str, *arguments: str) -> tuple[list[int], str]:
    """Run ``python -m module arguments`` in two processes that nobody watches; their exit codes, the first one's errors."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join([str(_ROOT / "src"), str(_ROOT), os.environ.get("PYTHONPATH", "")])
    common = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", module, *arguments], cwd=_ROOT, text=True, stderr=subprocess.PIPE,
            env={**os.environ, **common, "WORLD_SIZE": "2", "RANK": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        (_, error), _ = (rank.communicate(timeout=240) for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
    return [rank.returncode for rank in ranks], error


def say(line: str) -> None:
    """One line to the standard output, where several processes write."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
