"""Row: clocks that the forward pass asks."""

from __future__ import annotations

import copy
import runpy
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from tests.support import clocked


class _Timed(nn.Module):
    """Two layers; between them, ``leave`` does something with the clock."""

    def __init__(self, leave: Callable[[_Timed, torch.Tensor, float], Any]) -> None:
        super().__init__()
        self.first, self.last, self.leave = nn.Linear(16, 64), nn.Linear(64, 16), leave
        self.at, self.took, self.shown, self.mean = 0.0, 0.0, "", 0.0
        self.by_layer = {"first": 0, "last": 0}

    def forward(self, x: torch.Tensor) -> Any:
        begun = perf_counter()
        hidden = self.first(x).tanh()
        left = self.leave(self, hidden, begun)
        return self.last(hidden.tanh()), left


def _at(model: _Timed, _: torch.Tensor, begun: float) -> None:
    model.at = time.perf_counter()


def _by_helper(model: _Timed, _: torch.Tensor, begun: float) -> None:
    model.at = clocked.now()


def _returned(model: _Timed, _: torch.Tensor, begun: float) -> Any:
    return {"begun": begun, "took": [perf_counter() - begun]}


def _by_layer(model: _Timed, _: torch.Tensor, begun: float) -> None:
    begun_ns = time.perf_counter_ns()
    model.by_layer["first"] = time.perf_counter_ns() - begun_ns


def _summed(model: _Timed, hidden: torch.Tensor, begun: float) -> None:
    model.took += perf_counter() - begun
    model.mean = hidden.detach().mean().item()


def _shown(model: _Timed, hidden: torch.Tensor, begun: float) -> None:
    sys.stderr.write(f"{perf_counter() - begun:.3f} s")
    model.mean = hidden.detach().mean().item()


def _late(model: _Timed, hidden: torch.Tensor, begun: float) -> str:
    return "late" if perf_counter() - begun > 1e6 else "in time"


@pytest.mark.parametrize("leave", [_at, _by_helper, _returned, _by_layer, _summed, _shown, _late])
def test_planned_calls_ask_clocks_anew(leave: Any) -> None:
    model, x = _Timed(leave), torch.randn(64, 16)
    eager = copy.deepcopy(model)
    lowtide.rematerialize(model, (x,), budget="90%")
    took = 0.0
    for _ in range(4):
        before, took_before = time.perf_counter(), model.took
        y, left = model(x)
        after = time.perf_counter()
        z, _ = eager(x)
        for result in (y, z):
            result.square().sum().backward()
        assert torch.equal(y, z)
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), eager.parameters(), strict=True))
        assert model.mean == eager.mean
        if leave in (_at, _by_helper):
            assert before <= model.at <= after
        elif leave is _returned:
            assert before <= left["begun"] <= left["begun"] + left["took"][0] <= after
            assert type(left["begun"]) is float and left["took"] != took  # another one in every call
            took = left["took"]
        elif leave is _by_layer:
            assert type(model.by_layer["first"]) is int and 0 < model.by_layer["first"] <= (after - before) * 1e9
        elif leave is _summed:
            assert took_before < model.took <= took_before + after - before
        elif leave is _late:
            assert left == "in time"
    assert model.forward.parts is None


_SCRIPT = """
from time import perf_counter as now
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 16))

    def forward(self, x):
        return self.layers(x), now()
"""


def test_a_main_module_that_is_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in processes that ``multiprocessing`` spawns: variables of its functions are not its own."""
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    made = runpy.run_path(str(script), run_name="__mp_main__")
    copied = types.ModuleType("__mp_main__")
    vars(copied).update(made)
    monkeypatch.setitem(sys.modules, "__mp_main__", copied)
    model, x = made["Model"](), torch.randn(64, 16)
    lowtide.rematerialize(model, (x,), budget="100%")
    for _ in range(3):
        before = time.perf_counter()
        _, asked = model(x)
        assert before <= asked <= time.perf_counter()
