"""Reading a model's state call after call gives what reading it anew gives, whatever was changed in between."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lowtide.capture.model_state import StateReader, model_state


def _block() -> nn.Module:
    block = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3, bias=False))
    block.register_buffer("scale", torch.ones(3))
    block.register_buffer("nothing", None)
    return block


def _model() -> nn.Module:
    model = nn.ModuleDict({"first": _block(), "second": _block()})
    model["again"] = model["first"]  # a module in two places
    return model


def _replace_parameter(model: Any, number: random.Random) -> None:
    linear = number.choice([model["first"][0], model["second"][0]])
    linear.weight = nn.Parameter(torch.randn(3, 3))


def _tie(model: Any, number: random.Random) -> None:
    model["second"][0].weight = model["first"][0].weight


def _untie(model: Any, number: random.Random) -> None:
    model["second"][0].weight = nn.Parameter(torch.randn(3, 3))


def _drop_bias(model: Any, number: random.Random) -> None:
    model["first"][0].bias = None if model["first"][0].bias is not None else nn.Parameter(torch.zeros(3))


def _rename(model: Any, number: random.Random) -> None:
    registry = model["first"]._parameters
    name = next(iter(registry), None)
    if name is None:
        model["first"].register_parameter("own", nn.Parameter(torch.ones(2)))
    else:
        registry[name + "x"] = registry.pop(name)


def _move(model: Any, number: random.Random) -> None:
    """The same parameter under the same name in the next module of the tree."""
    source, target = number.sample([model["first"], model["second"]], 2)
    if "own" in source._parameters:
        target._parameters["own"] = source._parameters.pop("own")


def _replace_module(model: Any, number: random.Random) -> None:
    model["second"][1] = nn.BatchNorm1d(3)


def _remove_module(model: Any, number: random.Random) -> None:
    if len(model["second"]) > 2:
        del model["second"][-1]


def _reorder(model: Any, number: random.Random) -> None:
    children = model._modules
    name = number.choice([*children])
    children[name] = children.pop(name)


def _shift_buffer(model: Any, number: random.Random) -> None:
    block = model["second"]
    block.nothing, block.scale = block.scale, block.nothing


_CHANGES: tuple[Callable[[Any, random.Random], None], ...] = (
    _replace_parameter, _tie, _untie, _drop_bias, _rename, _move, _replace_module, _remove_module, _reorder, _shift_buffer,
)  # fmt: skip


def _same(read: Any, new: Any) -> bool:
    identical = all(
        [*map(id, getattr(read, name))] == [*map(id, getattr(new, name))]
        for name in ("tensors", "registered", "modules")
    )
    return identical and (read.names, read.parameters, read.units) == (new.names, new.parameters, new.units)


@pytest.mark.parametrize("seed", range(20))
def test_reads_what_is_there_after_any_change(seed: int) -> None:
    number, model, read = random.Random(seed), _model(), StateReader()
    for _ in range(40):
        assert _same(read(model), model_state(model))
        assert _same(read(model), model_state(model))
        number.choice(_CHANGES)(model, number)
    assert _same(read(model), model_state(model))


def test_keeps_nothing_alive() -> None:
    model, read = _model(), StateReader()
    read(model)
    was = weakref.ref(model["second"][1])
    model["second"][1] = nn.Identity()
    gc.collect()
    assert was() is None


def test_a_model_without_tensors_and_one_with_one() -> None:
    for model in (nn.Identity(), nn.PReLU()):
        read = StateReader()
        for _ in range(2):
            assert _same(read(model), model_state(model))
