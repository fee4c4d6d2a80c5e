"""Arguments that are no plain tensors, where the calls before had plain ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import lowtide
from tests.fuzz.changed import Computes, rows


class Marked(torch.Tensor):
    pass


def test_a_class_of_tensors() -> None:
    """It is refused, and taken for no plain one."""
    model = Computes(lambda s, y, x, v: y * (1 + (type(v) is Marked)))
    lowtide.rematerialize(model, (rows(), torch.ones(4)), budget="100%", planner="keep-all", on_capture_error="error")
    model(rows(), torch.ones(4)).backward()
    with pytest.raises(lowtide.CaptureError, match="a Marked of layout"):
        model(rows(), torch.ones(4).as_subclass(Marked))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
        (lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8), "quantized"),
    ],
)
def test_tensors_that_no_trace_knows(make: Callable[[], torch.Tensor], kind: str) -> None:
    model = Computes(lambda s, y, x, v: y)
    with pytest.raises(lowtide.CaptureError, match=f"a {kind} Tensor of layout"):
        lowtide.rematerialize(model, (rows(), make()), budget="100%", on_capture_error="error")
