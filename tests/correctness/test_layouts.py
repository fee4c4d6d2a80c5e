"""Tensors that are laid out in uncommon ways: the captured program runs the kernels that eager runs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import lowtide
from lowtide.capture import capture
from lowtide.capture.trace import real_strides
from lowtide.cost.synthetic import synthetic_tensor
from lowtide.ir.graph import TANGENT_TARGET
from lowtide.objects.clones import arrays_as_they_lie
from lowtide.program import Program
from lowtide.program.layouts import contiguous_strides
from lowtide.program.references import map_references
from tests.support.networks import generator
from tests.support.training import MINIMUM, compare_training


class _Patches(nn.Module):
    """Batch normalisation of channels that come last, and a loss between tensors of different layouts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embed(x).transpose(1, 2))
        flat = hidden.view(hidden.shape[0], -1).relu().view(hidden.shape).transpose(1, 2)
        return functional.mse_loss(self.head(flat).transpose(1, 2), x.transpose(1, 2).contiguous())


class _Mixer(nn.Module):
    """Layer normalisation before and after a transposition."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(12), nn.LayerNorm(12)
        self.tokens, self.channels = nn.Linear(8, 8), nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = x + self.tokens(self.first(x).transpose(1, 2)).transpose(1, 2)
        return self.channels(self.second(mixed).relu()).square().mean()


class _Pyramid(nn.Module):
    """Images pooled to one point and enlarged again: a dimension of size 1 can be laid out in two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.point, self.context = nn.Conv2d(16, 8, 1), nn.Conv2d(24, 16, 3, padding=1)
        self.norm, self.smooth = nn.BatchNorm2d(8), nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        point = self.norm(self.point(functional.adaptive_avg_pool2d(x, 1))).relu()
        whole = torch.cat([x, functional.interpolate(point, x.shape[2:], mode="bilinear")], 1)
        small = functional.avg_pool2d(self.context(whole), 2)
        return self.smooth(x + functional.interpolate(small, x.shape[2:], mode="bilinear")).square().mean()


class _Positions(nn.Module):
    """Position embeddings behind a class token, interpolated as vision transformers do: a view of a slice whose stride in the
    dimension of size 1 decides whether interpolation takes it as channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(1, 17, 16))
        self.mix = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grid = self.positions[:, 1:].view(1, 4, 4, 16).permute(0, 3, 1, 2)
        grid = functional.interpolate(grid, (6, 6), mode="bilinear").view(1, 16, 36).permute(0, 2, 1)
        return self.mix(x + torch.cat([self.positions[:, :1], grid], 1)).relu().square().mean()


def _sequences(iteration: int) -> Any:
    return (torch.randn(16, 12, 6, generator=generator(iteration)),), {}


def _tokens(iteration: int) -> Any:
    return (torch.randn(16, 8, 12, generator=generator(iteration)),), {}


def _images(iteration: int) -> Any:
    images = torch.randn(4, 16, 8, 8, generator=generator(iteration))
    return (images.to(memory_format=torch.channels_last),), {}


def _patches(iteration: int) -> Any:
    return (torch.randn(3, 37, 16, generator=generator(iteration)),), {}


CASES = {
    "patches": (_Patches, _sequences),
    "mixer": (_Mixer, _tokens),
    "pyramid": (_Pyramid, _images),
    "positions": (_Positions, _patches),
}


@pytest.mark.parametrize("case", CASES)
def test_training(case: str) -> None:
    compare_training(*CASES[case], budgets=("70%", MINIMUM) if case == "mixer" else (MINIMUM,))


def test_compiled_training_of_positions() -> None:
    compare_training(*CASES["positions"], budgets=(MINIMUM,), compiler="inductor", tolerance=2e-5)


@pytest.mark.parametrize("case", CASES)
def test_captured_strides_are_real(case: str) -> None:
    model, inputs = CASES[case]
    args, kwargs = inputs(0)
    program = capture(model(), args, kwargs).program
    assert [
        line for op in program.graph.ops if op.target != TANGENT_TARGET for line in _differences(program, op.id)
    ] == []


def _differences(program: Program, op: int) -> list[str]:
    tensors: dict[int, torch.Tensor] = {}
    call = program.calls[op]
    target: Callable[..., Any] = call.target

    def tensor(ref: Any) -> torch.Tensor:
        return tensors.setdefault(ref.value, synthetic_tensor(program.metas[ref.value]))

    args, kwargs = map_references((call.args, call.kwargs), tensor)
    with torch.no_grad():
        result = target(*args, **kwargs)
    real = [result] if call.positions is None else [result[position] for position in call.positions]
    metas = [program.metas[value] for value in program.graph.ops[op].outputs]
    return [
        f"{target}: {meta.stride} captured, {found.stride()} real"
        for meta, found in zip(metas, real, strict=True)
        if found.stride() != meta.stride
    ]


def _laid_out(layout: str, *shape: int) -> torch.Tensor:
    if layout == "transposed":
        return torch.randn(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)
    if layout == "in the middle":
        return torch.randn(*shape[:-1], shape[-1] + 3)[..., 1 : shape[-1] + 1]
    return torch.randn(*shape[:-1], 1).expand(shape) if layout == "expanded" else torch.randn(shape)


@pytest.mark.parametrize("left", ["plain", "transposed", "in the middle", "expanded"])
@pytest.mark.parametrize("right", ["plain", "transposed", "in the middle", "expanded"])
def test_products_return_matrices_in_order(left: str, right: str) -> None:
    """That of all operators they are not tried for their strides."""
    a, b, batches = _laid_out(left, 5, 7), _laid_out(right, 7, 1), (_laid_out(left, 1, 5, 7), _laid_out(right, 1, 7, 6))
    made = [a @ b, torch.addmm(_laid_out(left, 5, 1), a, b), torch.bmm(*batches)]
    made.append(torch.baddbmm(_laid_out(right, 1, 5, 6), *batches))
    assert set(real_strides._PRODUCTS) == {
        getattr(torch.ops.aten, n).default for n in ("mm", "addmm", "bmm", "baddbmm")
    }
    assert all(one.stride() == contiguous_strides(one.shape) for one in made)


_TABLE = np.arange(64, dtype=np.float32).reshape(8, 8)[::2, ::2].T


class _Tabled(nn.Module):
    """Multiplies by a table of NumPy's."""

    def __init__(self, made: Callable[[np.ndarray], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.table, self.made = nn.Linear(8, 4), _TABLE, made

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        table = self.made(self.table)
        return (self.first(x) @ table).square().mean(), table


@pytest.mark.parametrize(
    "made", [torch.from_numpy, torch.tensor, lambda table: torch.as_tensor(table[::-1].copy()).t()]
)
def test_constants_that_are_made_of_arrays(made: Callable[[np.ndarray], torch.Tensor]) -> None:
    model = _Tabled(lambda table: made(table)[:4, :4])
    x = torch.randn(8, 8)
    lowtide.rematerialize(model, (x,), budget="100%", on_capture_error="error")
    found, expected = model(x)[1], made(_TABLE)[:4, :4]
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()


def test_copies_of_arrays_lie_in_memory_as_these_do() -> None:
    whole = np.arange(16.0).reshape(4, 4)
    dates = np.array(["2020-01-01", "2020-01-02"], "M8[D]")
    fields = np.zeros(3, [("a", float), ("b", int)])
    arrays = [whole[::2, ::-1].T, whole, dates[1:], dates, fields["b"], np.frombuffer(b"abc"[:2], "u1")]
    arrays += [np.broadcast_to(np.arange(3.0), (4, 3)), np.zeros((0, 3))[:, ::2], np.array([[1, "a"]], object)]
    with arrays_as_they_lie():
        copies = copy.deepcopy(arrays)
    for array, copied in zip(arrays, copies, strict=True):
        assert np.array_equal(array, copied)
        assert (array.strides, array.flags.writeable) == (copied.strides, copied.flags.writeable)
        assert not np.shares_memory(array, copied)
    assert np.shares_memory(copies[0], copies[1])
    assert np.shares_memory(copies[2], copies[3])
    mixed, late = np.zeros(3, [("a", "f4"), ("o", "O")])["a"], np.arange(10.0)
    written = late[2:]
    late.setflags(write=False)
    with arrays_as_they_lie():
        copies = copy.deepcopy([mixed, written, late])
    assert [one.flags.writeable for one in copies] == [True, True, False]
    assert all(map(np.array_equal, copies, (mixed, written, late)))
    with arrays_as_they_lie():  # much more than the view shows
        parts = copy.deepcopy([np.zeros(1 << 24)[:2], np.zeros((1 << 16, 64))[:, :1]])
    assert [one.base for one in parts] == [None, None]
