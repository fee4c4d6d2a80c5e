"""The file as second memory: its room is used again, and nobody waits for ever, whatever happens to its thread or process."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import lowtide
from lowtide.offload.disk import DiskLease, DiskMemory
from tests.support.leases import let_go_inside_a_lease

_MIB = 1 << 20


def _round_trip(lease: DiskLease) -> bool:
    tensor = torch.arange(5000.0)
    copies = lease.offload(0, (tensor,))
    copies.left()
    (again,) = copies.fetch()
    copies.back()
    return torch.equal(tensor, again)


@pytest.mark.parametrize("error", [MemoryError("none left"), ValueError("what"), SystemExit(3)])
def test_whatever_goes_wrong_in_the_thread_is_an_error_of_its_transfer(error: BaseException, tmp_path: Path) -> None:
    memory = DiskMemory(str(tmp_path))

    def fails(buffer: object) -> None:
        raise error

    job = memory.begin(fails)
    assert job.done.wait(30)
    with pytest.raises(lowtide.ExecutionError, match=f"written to the file .*: {type(error).__name__}: "):
        job.wait("could not be written to")
    assert _round_trip(memory.lease(_MIB))


def test_room_of_other_sizes_is_used_again(tmp_path: Path) -> None:
    memory = DiskMemory(str(tmp_path))
    for count in range(1, 20):
        lease = memory.lease(count * _MIB)
        assert os.fstat(memory._file).st_size == count * _MIB
        del lease
    halves = [memory.lease(9 * _MIB), memory.lease(10 * _MIB)]
    assert {(one.offset, one.offset + size * _MIB) for one, size in zip(halves, (9, 10), strict=True)} == {
        (0, 9 * _MIB), (9 * _MIB, 19 * _MIB),
    }  # fmt: skip
    halves.clear()
    assert memory.lease(19 * _MIB).offset == 0
    assert os.fstat(memory._file).st_size == 19 * _MIB


def test_room_that_the_file_has_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = DiskMemory(str(tmp_path))
    monkeypatch.setattr(os, "fstatvfs", lambda file: SimpleNamespace(f_bavail=5, f_frsize=1))
    lease = memory.lease(_MIB)
    assert memory.free_bytes() == 5
    del lease
    assert memory.free_bytes() == 5 + _MIB


def test_a_folder_that_went_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a relative one does when the process changes its folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    memory = DiskMemory("here")
    free, identity = memory.free_bytes(), memory.identity()
    assert free > 0
    (tmp_path / "here").rename(tmp_path / "there")
    assert memory.free_bytes() > 0
    assert memory.identity() == identity
    assert _round_trip(memory.lease(_MIB))


def test_file_systems_in_memory_are_no_disk(caplog: pytest.LogCaptureFixture) -> None:
    mounts = Path("/proc/mounts")
    if not mounts.exists() or " /dev/shm tmpfs " not in mounts.read_text(encoding="utf-8"):
        pytest.skip("no file system in memory is known here")
    DiskMemory("/dev/shm")
    (record,) = caplog.records
    assert "files in /dev/shm are kept in memory" in record.message


def test_room_comes_back_whatever_the_thread_is_doing(tmp_path: Path) -> None:
    """The garbage collector gives back leases in the middle of another lease."""
    memory = DiskMemory(str(tmp_path))
    leases = [memory.lease(_MIB)]
    let_go_inside_a_lease(memory, leases)
    assert memory.free_bytes() >= _MIB


def test_a_forked_process_has_a_file_of_its_own(tmp_path: Path) -> None:
    program = f"""
        import os, signal, torch, lowtide
        from torch import nn
        from lowtide.offload import open_memory
        torch.set_num_threads(1)
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4)))
        x = torch.randn(256, 32)

        def step():
            model.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

        expected = step()
        folder = "disk:" + {str(tmp_path)!r}
        lowtide.rematerialize(model, (x,), budget="50%", planner="offload{{effort=0}}", offload=folder)
        assert lowtide.plans(model)[0].schedule.moves
        step()
        begun = model(x).square().mean()
        file = os.fstat(open_memory(folder, torch.device("cpu"))._file).st_ino
        if os.fork() == 0:
            signal.alarm(60)
            try:
                begun.backward()
            except lowtide.ExecutionError as error:
                assert "forked" in str(error), error
            else:
                raise AssertionError
            assert all(map(torch.equal, step(), expected))
            assert os.fstat(open_memory(folder, torch.device("cpu"))._file).st_ino != file
            print("the child is right", flush=True)
            os._exit(0)
        _, status = os.wait()
        begun.backward()
        assert all(map(torch.equal, step(), expected))
        print("status", status)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False)
    assert done.stdout == "the child is right\nstatus 0\n", done.stderr


def test_systems_that_lack_something(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fallocate")
    memory = DiskMemory(str(tmp_path))
    lease = memory.lease(_MIB)
    assert os.fstat(memory._file).st_size == _MIB
    assert _round_trip(lease)
    monkeypatch.delattr(os, "preadv")
    with pytest.raises(lowtide.ExecutionError, match="preadv"):
        DiskMemory(str(tmp_path))
