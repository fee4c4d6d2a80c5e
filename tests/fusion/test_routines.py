"""Routines give their operators' results; they are taken where they are quicker, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.capture import capture
from lowtide.cost import CostCache
from lowtide.cost.cache import OperatorCost
from lowtide.cost.measured import synthetic_arguments
from lowtide.cost.signature import signature
from lowtide.fusion import autotune, autotuned, checked
from lowtide.fusion.comparison import compare
from lowtide.fusion.proof import check_same
from lowtide.fusion.routines import Routine, routines
from lowtide.program import Program
from tests.support.networks import WithLoss
from tests.support.training import compare_training

SPARE = 1 << 15


class _Products(nn.Module):
    """Matrix products in all layouts: a weight laid out either way, with a bias and without, and bare ones."""

    def __init__(self, rows: int, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Parameter(torch.randn(inner, width) / inner)
        self.mix = nn.Linear(width, width, bias=False)
        self.bias = nn.Parameter(torch.zeros(width))
        self.over_rows = nn.Parameter(torch.randn(rows, rows) / rows)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.addmm(self.bias, torch.relu(self.up(x)), self.down)
        return x + self.mix(torch.tanh(self.over_rows.t() @ x))


class _Pointwise(nn.Module):
    """Convolutions that are products, in two and three dimensions and one, and others between them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.wide = nn.Conv2d(8, 24, 1)
        self.narrow = nn.Conv2d(24, 8, 1, bias=False)
        self.rows = nn.Conv1d(8, 8, 1)
        self.volume = nn.Conv3d(8, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(x))
        x = x + self.narrow(torch.relu(self.wide(x)))
        x = x + self.rows(x.flatten(2)).view_as(x)
        return self.volume(torch.tanh(x).unsqueeze(2))


class _Attention(nn.Module):
    """``heads`` of ``width``, the queries of every other row."""

    def __init__(self, heads: int, width: int, causal: bool = False, transposed: bool = True) -> None:
        super().__init__()
        self.to_all = nn.Linear(4, 3 * heads * width)
        self.heads, self.causal, self.transposed = heads, causal, transposed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.to_all(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if not self.transposed:
            query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        return nn.functional.scaled_dot_product_attention(query[:, :, ::2], key, value, is_causal=self.causal)


def _program(module: nn.Module, *shape: int) -> Program:
    return capture(WithLoss(module), (torch.randn(*shape),)).program


def _found(program: Program) -> dict[int, list[Routine]]:
    found = {op.id: routines(program, op.id, SPARE) for op in program.graph.ops}
    return {op: several for op, several in found.items() if several}


@pytest.mark.parametrize(
    ("make", "shape", "names"),
    [
        (lambda: _Products(96, 24, 56), (96, 24), {"onednn_mm", "onednn_mm_by_32", "onednn_addmm"}),
        (lambda: _Products(1, 3, 2), (1, 3), {"onednn_mm", "onednn_addmm"}),
        (lambda: _Products(33, 1, 70), (33, 1), {"onednn_mm", "onednn_addmm"}),
        (_Pointwise, (3, 3, 6, 5), {"onednn_convolution", "onednn_convolution_backward"}),
        (_Pointwise, (1, 3, 1, 1), {"onednn_convolution", "onednn_convolution_backward"}),
        (lambda: _Attention(3, 8), (2, 48, 4), {"wide_attention_backward_by_1"}),
        (lambda: _Attention(5, 3), (2, 20, 4), {"wide_attention_backward_by_3"}),
        (lambda: _Attention(3, 1, transposed=False), (1, 3, 4), {"wide_attention_backward_by_3"}),
        (lambda: _Attention(2, 15, causal=True), (3, 10, 4), {"wide_attention_backward_by_2"}),
    ],
)
def test_results_are_the_operators(make: Callable[[], nn.Module], shape: tuple[int, ...], names: set[str]) -> None:
    program = _program(make(), *shape)
    found = _found(program)
    assert names <= {routine.__name__ for several in found.values() for routine in several}
    for op, several in found.items():
        for routine in several:
            args, _, _ = synthetic_arguments(program, op)
            with torch.no_grad():
                assert not compare(routine.operator(*args), routine(*args)), routine.__name__


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(8, 8, dtype=torch.float64),
        lambda: nn.Linear(8, 8, dtype=torch.bfloat16),
    ],
)
def test_other_precisions_have_none(make: Callable[[], nn.Module]) -> None:
    module = make()
    x = torch.randn(4, 8, dtype=next(module.parameters()).dtype)
    assert not _found(capture(WithLoss(module), (x,)).program)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 4, 1, stride=2),
        nn.Conv2d(4, 4, 1, padding=1),
        nn.Conv2d(4, 4, 1, groups=2),
        nn.Conv2d(4, 4, 3),
        nn.ConvTranspose2d(4, 4, 1),
        nn.Conv2d(4, 4, 1).to(memory_format=torch.channels_last),
    ],
)
def test_other_convolutions_have_none(layer: nn.Module) -> None:
    assert not _found(_program(nn.Sequential(layer, nn.Tanh()), 2, 4, 6, 6))


class _Scaled(nn.Module):
    """Products with factors, with a whole matrix added, and of a matrix of one row shown many times."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.row = nn.Parameter(torch.randn(1, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.addmm(x, x, self.weight, beta=0.5, alpha=2.0)
        x = torch.addmm(x, torch.tanh(x), self.weight)
        return self.row.expand(8, 8).mm(x)


def test_what_a_routine_cannot_take_stays() -> None:
    program = _program(_Scaled(), 8, 8)
    taken = {
        op for op in _found(program) if program.calls[op].kwargs or program.graph.ops[op].target == "aten.addmm.default"
    }
    assert not taken
    spread = [op for op in program.graph.ops if any(0 in program.metas[v].stride for v in op.inputs)]
    assert spread and not set(_found(program)).intersection(op.id for op in spread)


def test_wide_heads_and_large_parts_have_none() -> None:
    for program in (_program(_Attention(2, 16), 2, 10, 4), _program(_Attention(2, 8), 2, 100, 4)):
        assert any("attention" in op.target for op in program.graph.ops)
        assert not any("attention" in routine.__name__ for several in _found(program).values() for routine in several)


@pytest.fixture
def costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for costs with nothing in it."""
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path))
    return tmp_path


def _known(program: Program, quicker: float, larger: int) -> list[int]:
    """Keep costs in which every routine takes ``quicker`` of its operator's time and ``larger`` bytes more; the ops."""
    cache = CostCache.open(torch.device("cpu"))
    spare = autotune._spare_bytes(program)
    tuned = []
    for op in program.graph.ops:
        several = routines(program, op.id, spare[op.id])
        if several:
            tuned.append(op.id)
            cache.put(signature(program, op.id), OperatorCost(1000, 0, 1 << 20, (4096,), (1,)))
        for routine in several:
            other = autotune.with_routines(program, {op.id: routine})
            cache.put(
                signature(other, op.id), OperatorCost(round(1000 * quicker), 0, (1 << 20) + larger, (4096,), (1,))
            )
    cache.save()
    return tuned


def _taken(program: Program) -> list[int]:
    return [op for op, call in enumerate(program.calls) if isinstance(call.target, Routine)]


def test_quicker_routines_are_taken(costs: Path) -> None:
    program = _program(_Products(64, 16, 32), 64, 16)
    tuned = _known(program, quicker=0.6, larger=0)
    assert tuned and _taken(autotuned(program)) == tuned


@pytest.mark.parametrize(("quicker", "larger"), [(1.0, 0), (0.95, 0), (0.5, 1 << 20)])
def test_slower_and_larger_ones_are_not(costs: Path, quicker: float, larger: int) -> None:
    program = _program(_Products(64, 16, 32), 64, 16)
    assert _known(program, quicker, larger) and not _taken(autotuned(program))


def test_only_where_nobody_objects(costs: Path) -> None:
    program = _program(_Products(64, 16, 32), 64, 16)
    torch.use_deterministic_algorithms(True)
    try:
        _known(program, quicker=0.5, larger=0)
        assert not _taken(autotuned(program))
    finally:
        torch.use_deterministic_algorithms(False)
    torch.backends.mkldnn.set_flags(_enabled=False)
    try:
        _known(program, quicker=0.5, larger=0)
        assert not _taken(autotuned(program))
    finally:
        torch.backends.mkldnn.set_flags(_enabled=True)


def test_wrong_routines_are_not_taken(costs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lowtide.fusion import routines as module

    right, program = module._linear, _program(_Products(64, 16, 32), 64, 16)
    monkeypatch.setattr(autotune, "_is_better", _always)
    monkeypatch.setattr(autotune, "_agree", {})
    with monkeypatch.context() as wrong:
        wrong.setattr(module, "_linear", lambda *args: right(*args) * 1.001)
        assert not _taken(autotuned(program))
    monkeypatch.setattr(autotune, "_agree", {})
    assert _taken(autotuned(program))


def test_what_was_measured_is_not_tried_again(costs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = _program(_Products(64, 16, 32), 64, 16)
    tuned = _known(program, quicker=0.6, larger=0)
    monkeypatch.setattr(autotune, "compare", lambda *results: pytest.fail("tried"))
    assert _taken(autotuned(program)) == tuned


def _always(record: OperatorCost, best: OperatorCost, own: OperatorCost, spare_bytes: int) -> bool:
    return True


def test_wrong_routines_are_found_in_a_check(monkeypatch: pytest.MonkeyPatch) -> None:
    from lowtide.fusion import routines as module

    monkeypatch.setattr(autotune, "_is_better", _always)
    model = WithLoss(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)))
    x = torch.randn(8, 16)
    model = lowtide.rematerialize(model, (x,), budget="100%", compiler="inductor")
    with checked():
        model(x).backward()
    right = module._linear
    monkeypatch.setattr(module, "_linear", lambda *args: right(*args) * 1.001)
    with checked(), pytest.raises(lowtide.CompiledMismatchError, match="onednn_addmm, which stands for aten"):
        model(x)


def _samples(*shape: int) -> Callable[[int], Any]:
    return lambda iteration: ((torch.randn(*shape, generator=torch.Generator().manual_seed(iteration)),), {})


@pytest.mark.parametrize(
    ("make", "shape"),
    [(lambda: _Products(96, 24, 56), (96, 24)), (_Pointwise, (3, 3, 6, 5))],
    ids=["products", "images"],
)
def test_training(make: Callable[[], nn.Module], shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """With every routine taken: gradients close to eager's, peaks as predicted and within the budget."""
    monkeypatch.setattr(autotune, "_is_better", _always)
    compare_training(
        lambda: WithLoss(make()), _samples(*shape), budgets=("100%", "70%"), tolerance=2e-5, compiler="inductor"
    )


def test_the_proof_reads_the_operator() -> None:
    program = _program(_Products(64, 16, 32), 64, 16)
    found = _found(program)
    check_same(program, autotune.with_routines(program, {op: several[0] for op, several in found.items()}))
    wrong = {op: Routine(torch.ops.aten.mul.Tensor, several[0].compute, "other") for op, several in found.items()}
    with pytest.raises(lowtide.CompiledMismatchError):
        check_same(program, autotune.with_routines(program, wrong))
