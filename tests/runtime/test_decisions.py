"""What operators decide in one run is taken over in the next: ``parts.decisions``."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lowtide
from lowtide.runtime.parts import decisions
from lowtide.runtime.parts.decisions import recording, replaying
from lowtide.runtime.parts.recomputed import Recomputation


def _decided(x: torch.Tensor) -> list[torch.Tensor | float | bool]:
    values, places = x.topk(2)
    (gradient,) = torch.autograd.grad(values.sum(), x)
    numbers = [x.sum().item(), torch.equal(x, x.abs()), int(x[0, 0])]
    return [places, gradient != 0, x > 0, x.argmax(1), (x > 0.5).nonzero(), torch.sort(x).indices, *numbers]


@pytest.mark.parametrize("with_key", [True, False])
def test_operators_decide_as_before(with_key: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not with_key:
        monkeypatch.setattr(decisions, "_key", lambda: None)
    x, made = torch.randn(6, 8, requires_grad=True), list[object]()
    with recording(made):
        first = _decided(x)
    with replaying(made):
        second = _decided((-x).detach().requires_grad_())
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    assert not torch.equal((-x).argmax(1), x.argmax(1))  # outside they decide by themselves


@pytest.mark.parametrize("with_key", [True, False])
def test_other_decisions_than_before_are_an_error(with_key: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not with_key:
        monkeypatch.setattr(decisions, "_key", lambda: None)
    made: list[object] = []
    with recording(made):
        torch.ones(3).argmax()
    with replaying(made), pytest.raises(lowtide.ExecutionError, match="does something else"):
        torch.ones(3).argmin()


class _Choosing(nn.Module):
    """``modes``: how many dispatch modes there are when it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.modes = nn.Linear(8, 8), list[int]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.modes.append(torch._C._len_torch_dispatch_stack())
        hidden = torch.tanh(self.layer(x))
        return hidden * (hidden > hidden.mean().item())


def test_no_operator_passes_a_mode() -> None:
    model, x = _Choosing(), torch.randn(4, 8)
    if decisions._key() is None:
        pytest.skip("this build of PyTorch has no key")
    seen = model.modes
    Recomputation().run(model, model.forward, (x,), {}, lambda: seen.append(-1)).sum().backward()
    assert set(seen) == {0, -1}
