"""Linear networks in a budget proportional to the root of their depth: e* runs a bounded number of operators per layer."""

from __future__ import annotations

import json

import pytest

from benchmarks.online_theorem import (
    BOUND,
    BOUNDED,
    LAYERS,
    RESULTS,
    Point,
    budget_for,
    curve,
    document,
    exceeding,
    linear_network,
    measure,
)
from lowtide.trace import simulate, unconstrained_peak_bytes


def test_the_network() -> None:
    for layers in (2, 5, 64):
        trace = linear_network(layers)
        assert trace.time_ns == 2 * layers
        assert unconstrained_peak_bytes(trace) == layers
        assert simulate(trace, layers, "e-star", policy="banish").time_ns == 2 * layers


@pytest.mark.parametrize("heuristic", BOUNDED)
def test_operators_per_layer_are_bounded(heuristic: str) -> None:
    """The constant is 4.5 with a budget of twice the root."""
    assert BOUND == 4.5
    for layers in (64, 256, 1024, 2048):
        operators = measure(heuristic, "banish", layers).operators
        assert operators is not None and operators <= BOUND * layers


def test_lru_is_not_bounded() -> None:
    points = curve("lru", "eager", (64, 256, 1024))
    growth = [point.operators / point.layers for point in points if point.operators is not None]
    assert len(growth) == 3
    assert growth[2] > 2 * growth[1] > 4 * growth[0]


def test_budgets_are_roots() -> None:
    assert [budget_for(layers) for layers in (64, 65, 16384)] == [16, 18, 256]


def test_the_page() -> None:
    points = curve("e-star", "banish", (64, 128))
    assert "| 64 | 16 | 3.16 | - |" in document(points)
    assert exceeding(points) == []


def test_the_committed_results_hold() -> None:
    rows = json.loads((RESULTS / "online_theorem.json").read_text())
    points = [Point(**row) for row in rows]
    assert exceeding(points) == []
    assert {point.layers for point in points if point.heuristic == "e-star"} == set(LAYERS)
    assert (RESULTS / "online_theorem.md").read_text() == document(points)
    assert (RESULTS / "online_theorem.svg").exists()
