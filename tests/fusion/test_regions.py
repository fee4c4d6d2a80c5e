"""Which operators become one kernel: what has to be written to memory stays apart, the rest vanishes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lowtide.capture import capture
from lowtide.fusion import Kernel, rewrite, split_norms
from lowtide.ir import check, is_view, keep_all_schedule
from lowtide.program import Program


class _TanhGelu(nn.Module):
    """GELU spelled out, eight pointwise operators on one tensor, between two matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        h = 0.5 * h * (1 + torch.tanh(0.79788456 * (h + 0.044715 * h**3)))
        result: torch.Tensor = self.down(h)
        return result.square().mean()


class _Product(nn.Module):
    """A product of two large tensors that is read twice: computing it again would read both."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = self.a(x) * self.b(x)
        result: torch.Tensor = self.c(product.sin()) * product
        return result.square().mean()


def _programs(model: nn.Module) -> tuple[Program, Program]:
    program = capture(model, (torch.randn(64, 8),)).program
    return program, rewrite(program)


def _names(program: Program) -> list[list[str]]:
    """The ATen names inside every kernel, views left out."""
    kernels = [call.target for call in program.calls if isinstance(call.target, Kernel)]
    return [[str(line.call.target).split(".")[1] for line in kernel.body.lines] for kernel in kernels]


def _saved_bytes(program: Program) -> int:
    """Bytes of the storages of the forward pass that the backward pass reads."""
    graph = program.graph
    made = {s.id for s in graph.storages if s.base is not None and s.base < graph.forward_ops}
    read = {graph.values[v].storage for op in graph.ops[graph.forward_ops :] for v in op.inputs}
    return sum(program.metas[graph.storages[s].values[0]].storage_bytes for s in made & read)


def test_chain_becomes_one_kernel_each_way() -> None:
    program, fused = _programs(_TanhGelu())
    names = _names(fused)
    forward = next(n for n in names if "tanh" in n and "tanh_backward" not in n)
    backward = next(n for n in names if "tanh_backward" in n)
    assert {"pow", "tanh", "mul", "add"} <= set(forward)
    assert {"pow", "tanh", "mul", "add"} <= set(backward), "the chain is computed again inside the backward kernel"
    assert _saved_bytes(fused) < _saved_bytes(program) / 2


def test_matrix_products_stay_calls() -> None:
    program, fused = _programs(_TanhGelu())
    count: Any = lambda p: sum("mm" in op.target for op in p.graph.ops)  # noqa: E731
    assert count(program) == count(fused) > 0


def test_products_of_large_tensors_are_kept() -> None:
    _, fused = _programs(_Product())
    sines = [n for n in _names(fused) if "sin" in n]
    assert not any("mul" in n and "sin" in n and n.index("mul") < n.index("sin") for n in sines)


def test_fused_program_is_a_program() -> None:
    for model in (_TanhGelu(), _Product()):
        program, fused = _programs(model)
        check(fused.graph, keep_all_schedule(fused.graph))
        assert len(fused.gradients) == len(program.gradients)
        assert [position for position, _ in fused.gradients] == [position for position, _ in program.gradients]
        assert len(fused.graph.ops) == len(fused.calls)
        assert len(fused.graph.values) == len(fused.metas)
        assert sum(not is_view(fused.graph, op) for op in fused.graph.ops) < len(program.graph.ops)


def test_repeated_layers_share_kernels() -> None:
    layers = nn.Sequential(
        *(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Tanh()) for _ in range(6)), nn.Linear(16, 1)
    )
    program = rewrite(capture(layers, (torch.randn(32, 16),)).program)
    kernels = [call.target for call in program.calls if isinstance(call.target, Kernel)]
    assert len(kernels) >= 11
    assert len({kernel.digest for kernel in kernels}) <= 4


class _Norms(nn.Module):
    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 8, 3, bias=False), nn.Conv2d(8, 4, 3, bias=False)
        self.norm = nn.GroupNorm(2, 8) if norm is nn.GroupNorm else norm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(torch.nn.functional.silu(self.norm(self.first(x))))
        return result.square().mean()


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.GroupNorm])
def test_normalised_tensors_are_not_saved(norm: type[nn.Module]) -> None:
    """The activation's kernels read the norm's input and statistics; what lies between is never written."""
    x = torch.randn(2, 4, 16, 16)
    program = rewrite(capture(_Norms(norm), (x,), rewrite=split_norms).program)
    kernels = [call.target for call in program.calls if isinstance(call.target, Kernel)]
    names = [{str(line.call.target).split(".")[1] for line in kernel.body.lines} for kernel in kernels]
    assert any({"sub", "mul", "silu"} <= found for found in names)
    assert any({"sub", "mul", "silu_backward"} <= found for found in names)
    statistics = next(kernel for kernel, found in zip(kernels, names, strict=True) if len(found) == 1)
    assert all(len(meta.shape) < 4 for meta in statistics.body.metas), "the kernel of the norm returns statistics only"
    assert _saved_bytes(program) < _saved_bytes(capture(_Norms(norm), (x,)).program)


class _SharedBias(nn.Module):
    """A bias added to batches in several places, ``between`` matrix products apart: its gradient is a sum of sums."""

    def __init__(self, between: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(16, 8))
        self.layers = nn.ModuleList(
            nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(between))) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x + self.bias)
        return x.square().mean()


@pytest.mark.parametrize(("between", "apart"), [(1, False), (6, True)])
def test_kernels_do_not_wait_for_what_comes_much_later(between: int, apart: bool) -> None:
    """Each layer's share of the bias' gradient is summed where it arises, unless the next one is near."""
    program = rewrite(capture(_SharedBias(between), (torch.randn(32, 16, 8),)).program)
    kernels = [call.target for call in program.calls if isinstance(call.target, Kernel)]
    sums = [kernel for kernel in kernels if "aten.sum.dim_IntList" in kernel.body.operators]
    large = [sum(meta.shape == (512, 8) for meta in kernel.body.inputs) for kernel in sums]
    assert sum(large) >= 3
    assert (max(large) == 1) == apart


class _Bias(nn.Module):
    """Attention's probabilities with a bias from a table whose last dimension is the head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(16, 16, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.table.permute(2, 0, 1).clone(memory_format=torch.contiguous_format)
        result: torch.Tensor = torch.softmax(x @ x.transpose(1, 2) + bias, -1) @ x
        return result.square().mean()


def test_passes_over_rows_read_them_in_order() -> None:
    names = _names(rewrite(capture(_Bias(), (torch.randn(4, 16, 8, requires_grad=True),)).program))
    (softmax,) = (name for name in names if "_softmax" in name)
    assert "add" in softmax and "clone" not in softmax
