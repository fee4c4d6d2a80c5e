"""What a random module may compute: for each kind of statement, how its options are chosen and how it runs.

``choose(rng, x, module)`` returns the options for an operand, or ``None`` where the kind does not fit; ``run(module, operands,
options)`` returns the new tensors. Operands are named by kinds in ``BINARY`` (two of the same shape and type) or one otherwise.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Tensors = Sequence[torch.Tensor]
Options = tuple[Any, ...]
MOST_ELEMENTS = 600  # of a tensor that is computed with further


@dataclass(frozen=True, slots=True)
class Operator:
    """A kind of statement."""

    choose: Callable[[random.Random, torch.Tensor], Options | None]
    run: Callable[..., torch.Tensor | Tensors]  # of the operands and the options
    operands: int = 1
    layer: Callable[..., nn.Module] | None = None  # made with the options and called with the operands


def _is_real(x: torch.Tensor) -> bool:
    return x.is_floating_point()


def _is_differentiable(x: torch.Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _dims(x: torch.Tensor, least: int = 1) -> list[int]:
    return [dim for dim, size in enumerate(x.shape) if size >= least]


def _none(rng: random.Random, x: torch.Tensor) -> Options | None:
    return () if _is_differentiable(x) else None


def _real(rng: random.Random, x: torch.Tensor) -> Options | None:
    return () if _is_real(x) else None


def _matrix(rng: random.Random, x: torch.Tensor) -> Options | None:
    return () if _is_real(x) and x.dim() >= 2 and x.numel() <= MOST_ELEMENTS else None


def _number(rng: random.Random, x: torch.Tensor) -> Options | None:
    return (round(rng.uniform(-1.5, 1.5), 3),) if _is_real(x) else None


def _one_dim(rng: random.Random, x: torch.Tensor) -> Options | None:
    return (rng.choice(_dims(x)),) if x.dim() and _is_differentiable(x) else None


def _real_dim(rng: random.Random, x: torch.Tensor) -> Options | None:
    return (rng.choice(_dims(x)),) if x.dim() and _is_real(x) else None


def _two_dims(rng: random.Random, x: torch.Tensor) -> Options | None:
    return tuple(rng.sample(range(x.dim()), 2)) if x.dim() >= 2 else None


def _select(rng: random.Random, x: torch.Tensor) -> Options | None:
    if not x.dim():
        return None
    dim = rng.choice(_dims(x))
    return dim, rng.randrange(x.shape[dim])


def _slice(rng: random.Random, x: torch.Tensor) -> Options | None:
    dims = _dims(x, 2)
    if not dims:
        return None
    dim = rng.choice(dims)
    start = rng.randrange(x.shape[dim] - 1)
    return dim, start, rng.randint(start + 1, x.shape[dim]), rng.choice((1, 1, 2))


def _sliced(x: torch.Tensor, dim: int, start: int, end: int, step: int) -> torch.Tensor:
    return x[(*(slice(None),) * dim, slice(start, end, step))]


def _parts(rng: random.Random, x: torch.Tensor) -> Options | None:
    dims = _dims(x, 2)
    return (rng.choice((2, 2, 3)), rng.choice(dims)) if dims else None


def _split(rng: random.Random, x: torch.Tensor) -> Options | None:
    dims = _dims(x, 3)
    if not dims:
        return None
    dim = rng.choice(dims)
    first = rng.randint(1, x.shape[dim] - 1)
    return (first, x.shape[dim] - first), dim


def _unbind(rng: random.Random, x: torch.Tensor) -> Options | None:
    dims = [dim for dim in _dims(x, 2) if x.shape[dim] <= 4]
    return (rng.choice(dims),) if dims else None


def _expand(rng: random.Random, x: torch.Tensor) -> Options | None:
    return (rng.randint(2, 3),) if _is_differentiable(x) and x.numel() <= MOST_ELEMENTS // 3 else None


def _unfold(rng: random.Random, x: torch.Tensor) -> Options | None:
    dims = _dims(x, 3)
    return (rng.choice(dims), 2, rng.choice((1, 2))) if dims else None


def _pairs(rng: random.Random, x: torch.Tensor) -> Options | None:
    fits = x.dim() and x.dtype in (torch.float32, torch.float64) and x.shape[-1] % 2 == 0 and x.is_contiguous()
    return () if fits else None


def _complex(rng: random.Random, x: torch.Tensor) -> Options | None:
    return () if x.is_complex() else None


def _wide(rng: random.Random, x: torch.Tensor) -> Options | None:
    return () if x.dim() and x.dtype in (torch.float32, torch.float64) else None


def _linear(rng: random.Random, x: torch.Tensor) -> Options | None:
    return (x.shape[-1], rng.choice((x.shape[-1], 4, 8))) if _is_real(x) and x.dim() >= 2 else None


def _last(rng: random.Random, x: torch.Tensor) -> Options | None:
    return (x.shape[-1],) if _is_real(x) and x.dim() >= 2 else None


def _image(rng: random.Random, x: torch.Tensor) -> Options | None:
    return (x.shape[1], rng.choice((x.shape[1], 4))) if _is_real(x) and x.dim() in (3, 4) else None


def _rows(rng: random.Random, x: torch.Tensor) -> Options | None:
    return (x.shape[1],) if _is_real(x) and x.dim() in (3, 4) and x.numel() > 2 * x.shape[1] else None


class _Convolution(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs, 3) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() == 4:
            return F.conv2d(x, self.weight[..., None].expand(-1, -1, -1, 3), padding=1)
        return F.conv1d(x, self.weight, padding=1)


class _Norm(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.one, self.two = nn.BatchNorm1d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(x) if x.dim() == 4 else self.one(x)


class _Scale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.randn(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.shift


def _attention(x: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(x, x.flip(-2), x, is_causal=x.dim() == 3)


def _write(x: torch.Tensor, value: float) -> torch.Tensor:
    return (x * 1.25).add_(value)


def _write_row(x: torch.Tensor, dim: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    y = x * 1.5
    return y.select(dim, index).mul_(0.5), y


def _write_sum(x: torch.Tensor, dim: int) -> torch.Tensor:
    y = x.clone()
    y += y.mean(dim, keepdim=True)
    return y


def _zeroed(x: torch.Tensor, dim: int, index: int) -> torch.Tensor:
    y = torch.zeros_like(x)
    y.select(dim, index).copy_(x.select(dim, index))
    return y


COMPUTED: dict[str, Operator] = {
    "tanh": Operator(_real, torch.tanh),
    "gelu": Operator(_real, F.gelu),
    "silu": Operator(_real, F.silu),
    "sin": Operator(_none, torch.sin),
    "scaled": Operator(_number, lambda x, number: x * number),
    "shifted": Operator(_number, lambda x, number: x + number),
    "square": Operator(_none, torch.square),
    "softmax": Operator(_real_dim, lambda x, dim: x.softmax(dim)),
    "normalized": Operator(_real_dim, lambda x, dim: F.normalize(x, dim=dim)),
    "cumsum": Operator(_real_dim, lambda x, dim: x.cumsum(dim)),
    "dropout": Operator(_real, lambda x: F.dropout(x, 0.3)),
    "relu in place": Operator(_real, lambda x: F.relu(x * 1.0, inplace=True)),
    "written": Operator(_number, _write),
    "row written": Operator(_select, lambda x, dim, index: _write_row(x, dim, index) if _is_real(x) else (x, x)),
    "mean added": Operator(_real_dim, _write_sum),
    "others zeroed": Operator(_select, _zeroed),
    "sum": Operator(_one_dim, lambda x, dim: x.sum(dim)),
    "mean": Operator(_real_dim, lambda x, dim: x.mean(dim, keepdim=True)),
    "amax": Operator(_real_dim, lambda x, dim: x.amax(dim)),
    "total": Operator(_real, lambda x: x.square().mean()),
    "attention": Operator(_matrix, _attention),
    "gram": Operator(_matrix, lambda x: x @ x.mT),
    "fft": Operator(_wide, torch.fft.fft),
    "abs": Operator(_complex, torch.abs),
    "add": Operator(_none, torch.add, 2),
    "add again": Operator(_none, torch.add, 2),
    "mul": Operator(_none, torch.mul, 2),
    "maximum": Operator(_real, torch.maximum, 2),
    "where": Operator(_real, lambda x, y: torch.where(x > y, x, y * 0.5), 2),
    "cat": Operator(_one_dim, lambda x, y, dim: torch.cat([x, y], dim), 2),
    "stack": Operator(_none, lambda x, y: torch.stack([x, y]), 2),
    "linear": Operator(_linear, lambda layer, x: layer(x), layer=nn.Linear),
    "linear without bias": Operator(_linear, lambda layer, x: layer(x), layer=lambda i, o: nn.Linear(i, o, bias=False)),
    "layer norm": Operator(_last, lambda layer, x: layer(x), layer=nn.LayerNorm),
    "scale": Operator(_last, lambda layer, x: layer(x), layer=_Scale),
    "convolution": Operator(_image, lambda layer, x: layer(x), layer=_Convolution),
    "batch norm": Operator(_rows, lambda layer, x: layer(x), layer=_Norm),
}

VIEWS: dict[str, Operator] = {
    "transpose": Operator(_two_dims, torch.transpose),
    "select": Operator(_select, torch.select),
    "slice": Operator(_slice, _sliced),
    "chunk": Operator(_parts, torch.chunk),
    "split": Operator(_split, torch.split),
    "unbind": Operator(_unbind, torch.unbind),
    "expand": Operator(_expand, lambda x, times: x.expand(times, *x.shape)),
    "reshape": Operator(_none, lambda x: x.reshape(-1)),
    "flatten": Operator(_none, lambda x: x.flatten(0, 1) if x.dim() >= 2 else x.view_as(x)),
    "diagonal": Operator(_two_dims, lambda x, one, two: x.diagonal(0, one, two)),
    "unfold": Operator(_unfold, lambda x, dim, size, step: x.unfold(dim, size, step)),
    "unsqueeze": Operator(_none, lambda x: x.unsqueeze(0)),
    "the same again": Operator(_none, lambda x: x.view_as(x)),
    "whole": Operator(_none, lambda x: x[...]),
    "detach": Operator(_none, torch.detach),
    "as complex": Operator(_pairs, lambda x: torch.view_as_complex(x.view(*x.shape[:-1], -1, 2))),
    "as real": Operator(_complex, lambda x: torch.view_as_real(x.resolve_conj())),
    "real": Operator(_complex, lambda x: x.real),
    "imag": Operator(_complex, lambda x: x.imag),
    "conj": Operator(_complex, torch.conj),
}

INTEGER: dict[str, Operator] = {
    "argmax": Operator(_real_dim, lambda x, dim: x.argmax(dim)),
    "positive": Operator(_real, lambda x: (x > 0).long()),
}

OPERATORS = {**COMPUTED, **VIEWS, **INTEGER}
