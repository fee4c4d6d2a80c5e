"""A model that is captured again is the same program, whatever PyTorch remembers of fake tensors by then."""

from __future__ import annotations

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.cost.signature import signature
from lowtide.pipeline import captured_program
from lowtide.program.sizes import storage_bytes
from lowtide.settings import Settings
from tests.fuzz.modules import Description, arguments, build, describe, surroundings


def _operators(description: Description) -> tuple[list[str], list[int]]:
    """What the costs of each operator are known by, and the bytes of each storage."""
    with surroundings(description):
        model = build(description)
        program = captured_program(model, arguments(description, 0), {}, Settings(budget="50%")).program
    return [signature(program, op.id) for op in program.graph.ops], list(storage_bytes(program))


# These write into slices, rows and columns: what copies a whole storage differed in its size and offset.
@pytest.mark.parametrize("seed", [107, 129, 172])
def test_a_second_capture_is_equal_to_the_first(seed: int) -> None:
    FakeTensorMode.cache_clear()
    description = describe(seed)
    assert _operators(description) == _operators(description)
