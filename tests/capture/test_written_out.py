"""Functions whose own code takes sizes as numbers have programs of all sizes, those of captures by that code."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import lowtide
from lowtide.capture import capture
from lowtide.capture.family import capture_family
from tests.support.training import make
from tests.support.versions import needs_2_13

IMAGES, SEQUENCES = (6, 4, 10, 14), (6, 9, 8)


class _Scaled(nn.Module):
    """A function of what a parameter scales, and the layers that it uses."""

    def __init__(self, function: Callable[..., torch.Tensor], *layers: nn.Module) -> None:
        super().__init__()
        self.function, self.layers, self.scale = function, nn.ModuleList(layers), nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x * self.scale, *self.layers)


def _resized(**how: Any) -> Callable[[], nn.Module]:
    return lambda: _Scaled(lambda x: functional.interpolate(x, **how))


def _recurrent(**how: Any) -> Callable[[], nn.Module]:
    return lambda: _Scaled(lambda x, lstm: lstm(x)[0], nn.LSTM(8, 12, **how))


RESIZED = {
    "nearest": _resized(scale_factor=2.0),
    "nearest, by no integer": _resized(scale_factor=1.5),
    "nearest, to a size": _resized(size=(20, 28)),
    "exact": _resized(scale_factor=2, mode="nearest-exact"),
    "bilinear": _resized(scale_factor=(2.0, 0.5), mode="bilinear"),
    "bilinear, corners": _resized(scale_factor=2.0, mode="bilinear", align_corners=True),
    "bicubic": _resized(scale_factor=0.5, mode="bicubic", antialias=True),
    "to twice its size": lambda: _Scaled(lambda x: functional.interpolate(x, (2 * x.shape[2], 2 * x.shape[3]))),
    "circular": lambda: _Scaled(lambda x: functional.pad(x, (1, 2, 1, 2), mode="circular")),
}
RECURRENT = {
    "one direction": _recurrent(batch_first=True),
    "both": _recurrent(num_layers=2, bidirectional=True, batch_first=True),
    "dropout": _recurrent(num_layers=3, dropout=0.2),
    "without bias": _recurrent(bias=False),
}


@needs_2_13
@pytest.mark.parametrize("build", RESIZED.values(), ids=RESIZED.keys())
def test_resized_images(build: Callable[[], nn.Module]) -> None:
    _check(build, IMAGES, [(8, 4, 12, 16), (5, 4, 8, 22)], (0, 2, 3))


COUNTED = {
    "mean": lambda: _Scaled(lambda x: x.exp().sum() / len(x)),
    "positions": lambda: _Scaled(lambda x: x + torch.arange(len(x[0]))),
    "compared": lambda: _Scaled(lambda x: x.sin() / max(1, len(x) + len(x.T)) if len(x) < 1000 else x),
}


@needs_2_13
@pytest.mark.parametrize("build", COUNTED.values(), ids=COUNTED.keys())
def test_lengths_by_len(build: Callable[[], nn.Module]) -> None:
    _check(build, (6, 9), [(6, 20), (3, 5)], (0, 1))


def _in_pieces(x: torch.Tensor) -> torch.Tensor:
    assert isinstance(range(3), range)
    assert [*range(5, -1, -2)] == [5, 3, 1]
    return torch.cat([x[first : min(first + 8, len(x))].exp() for first in range(0, len(x), 8)])


def _from_the_end(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x[max(last - 8, 0) : last].exp() for last in range(len(x), 0, -8)])


@needs_2_13
@pytest.mark.parametrize("function", [_in_pieces, _from_the_end])
def test_as_many_pieces_of_any_number_of_rows(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """What ``range`` asks of a size is how many steps there are."""
    model = make(lambda: _Scaled(function))
    family = capture_family(model, (torch.randn(12, 9),), {}, [(0, 0), (0, 1)], apart=True)
    assert not family.is_fixed
    for shape in ((14, 20), (11, 7)):
        assert family.confirmed_by(capture(model, (torch.randn(shape),)), (shape,))
    assert family.member(((17, 9),), lambda *_: None) is None
    assert family.member(((7, 9),), lambda *_: None) is None


@needs_2_13
def test_the_range_of_a_trace_is_no_condition(caplog: pytest.LogCaptureFixture) -> None:
    """Of a family, what its code reads under the name is what is there outside of captures."""
    caplog.set_level(logging.INFO, "lowtide")
    model = lowtide.rematerialize(_Scaled(_in_pieces), (torch.randn(11, 10),), budget="100%", planning="wait")
    for rows in (12, 13, 14, 13, 12):
        model(torch.randn(rows, 10)).sum().backward()
    assert len(lowtide.plans(model)) == 4
    assert ["capture" in one for one in caplog.messages] == [True, True, True, True, False]


@needs_2_13
@pytest.mark.parametrize("build", RECURRENT.values(), ids=RECURRENT.keys())
def test_recurrent_layers(build: Callable[[], nn.Module]) -> None:
    _check(build, SEQUENCES, [(6, 20, 8), (3, 5, 8)], (0, 1))


def _check(build: Callable[[], nn.Module], shape: Any, others: Any, varying: tuple[int, ...]) -> None:
    model = make(build)
    family = capture_family(model, (torch.randn(shape),), {}, [(0, dim) for dim in varying], apart=True)
    assert not family.is_fixed
    for other in others:
        assert family.confirmed_by(capture(model, (torch.randn(other),)), (other,))


@needs_2_13
def test_what_fixes_sizes_is_tried_twice(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lowtide")
    model = _Scaled(lambda x: torch.take_along_dim(x, x.argsort(1), 1))
    lowtide.rematerialize(model, (torch.randn(4, 8),), budget="100%")
    for rows in (5, 6, 7, 8):
        x = torch.randn(rows, 8)
        model(x).sum().backward()
    (message,) = [one for one in caplog.messages if "captured anew for each shape" in one]
    assert message.endswith("takes sizes as numbers")
