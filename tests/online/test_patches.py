"""What a context changes in the process is there once while one is active, and exactly as it was afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import lowtide
from lowtide.dynamic.patches import _ACCESS
from tests.online.scenarios import TENSOR_BYTES, chain


def _state() -> dict[str, Any]:
    """What the classes themselves have; what they inherit is not theirs."""
    own = {name: torch.Tensor.__dict__.get(name) for name in _ACCESS}
    return {**own, "start": threading.Thread.__dict__["start"], "names": set(torch.Tensor.__dict__)}


def test_every_patched_method_exists() -> None:
    """Fails where PyTorch renames one or begins to read tensors through another class."""
    for name in _ACCESS:
        assert callable(getattr(torch.Tensor, name)), name


def test_nested_contexts_patch_once() -> None:
    before = _state()
    with lowtide.online("1GiB"):
        outer = _state()
        assert all(outer[name] is not before[name] for name in (*_ACCESS, "start"))
        with lowtide.online("1GiB"):
            assert _state() == outer
        assert _state() == outer
    assert _state() == before


def test_the_last_context_of_any_thread_restores() -> None:
    before = _state()
    entered, leave = threading.Event(), threading.Event()

    def run() -> None:
        with lowtide.online("1GiB"):
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=run)
    thread.start()
    assert entered.wait(60)
    inside = _state()
    with lowtide.online("1GiB"):
        assert _state() == inside
    assert _state() == inside
    leave.set()
    thread.join(60)
    assert _state() == before


def test_a_context_that_cannot_be_entered_changes_nothing(tmp_path: Any) -> None:
    before = _state()
    nowhere = lowtide.online("1GiB", record=tmp_path / "missing" / "run.jsonl")
    with pytest.raises(lowtide.LowtideError, match="cannot write"), nowhere:
        pass
    assert _state() == before
    with lowtide.online("1GiB"):
        pass
    assert _state() == before


def test_what_somebody_else_replaced_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Theirs goes on to call ours, which then only passes on."""
    calls: list[torch.Tensor] = []

    def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
        def tolist(tensor: torch.Tensor) -> Any:
            calls.append(tensor)
            return original(tensor)

        return tolist

    monkeypatch.setattr(torch.Tensor, "tolist", torch.Tensor.tolist, raising=False)  # put back at the end
    monkeypatch.delattr(torch.Tensor, "tolist")
    before = _state()
    with lowtide.online(8 * TENSOR_BYTES):
        theirs = wrapped(torch.Tensor.tolist)
        torch.Tensor.tolist = theirs  # type: ignore[method-assign]
        values = [tensor.tolist() for tensor in chain()]
    try:
        assert torch.Tensor.__dict__["tolist"] is theirs
        assert [tensor.tolist() for tensor in chain()] == values
        assert len(calls) == 2 * len(values)
    finally:
        del torch.Tensor.tolist  # type: ignore[misc]
    assert _state() == before


def test_a_thread_keeps_nothing_of_ours() -> None:
    seen: list[dict[str, Any]] = []
    with lowtide.online("1GiB"):
        thread = threading.Thread(target=lambda: seen.append(dict(thread.__dict__)))
        thread.start()
        thread.join(60)
        with pytest.raises(RuntimeError, match="once"):
            thread.start()
    assert "run" not in seen[0]
    assert "run" not in thread.__dict__
