"""Random generators that the model's code names, or is given, and that are none of the model."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torch import nn

import lowtide
from tests.fuzz.changed import Computes, rows

_PYTHONS, _NUMPYS, _OLD = random.Random(1), np.random.default_rng(1), np.random.RandomState(1)


class Draws:
    generator = random.Random(1)


def _closing(generator: Any) -> Callable[..., Any]:
    return lambda s, y, x, *others: y * generator.random()


DRAWING: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "Python's, in a variable": (lambda s, y, x: y * _PYTHONS.random(), ()),
    "NumPy's, in a variable": (lambda s, y, x: y * _NUMPYS.random(), ()),
    "NumPy's of old, in a variable": (lambda s, y, x: y * float(_OLD.rand()), ()),
    "in a closure": (_closing(np.random.default_rng(2)), ()),
    "in a default": (lambda s, y, x, generator=np.random.default_rng(2): y * generator.random(), ()),  # noqa: B008
    "in a class": (lambda s, y, x: y * Draws.generator.random(), ()),
    "an argument": (lambda s, y, x, generator: y * generator.random(), (np.random.default_rng(2),)),
}


@pytest.mark.parametrize("name", DRAWING)
def test_generators_outside_of_the_model(name: str) -> None:
    """Their draws are refused, and leave them as they were."""
    compute, others = DRAWING[name]
    generators = (_PYTHONS, Draws.generator), (_NUMPYS,)
    model: nn.Module = Computes(compute)

    def states() -> list[Any]:
        return [one.getstate() for one in generators[0]] + [one.bit_generator.state for one in generators[1]]

    before = states()
    with pytest.raises(lowtide.CaptureError, match="draws from a random generator of its own"):
        lowtide.rematerialize(model, (rows(), *others), budget="100%", on_capture_error="error")
    assert states() == before
