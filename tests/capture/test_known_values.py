"""Masks of constants and positions: what a capture takes of memory for them, and what it tells of them where it is asked."""

from __future__ import annotations

import copy

import torch
from torch import nn

import lowtide
from lowtide.capture import capture
from lowtide.capture.trace.known_values import KnownValues
from lowtide.capture.trace.questions import Provenance

ROWS, WIDTH, LENGTH = 1, 32, 256
MASK_BYTES = 4 * LENGTH**2


class _Masked(nn.Module):
    """Layers with a bias for each distance, made anew in each of them. What the first call keeps is read by later ones."""

    def __init__(self, layers: int = 4, asks: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.asks = asks
        self.scale: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if self.scale is None:
            self.scale = self.layers[0].weight.detach().abs().mean()
        for number, layer in enumerate(self.layers):
            distances = positions[:, None] - positions[None] - number
            far = (distances.abs() > LENGTH // 2) & (distances != 0)
            if self.asks and bool(far.any()):
                x = x * 2
            bias = torch.where(far, -10.0, 0.0) - distances.abs() * 0.1
            weights = (x @ x.transpose(-1, -2) * self.scale + bias).softmax(-1)
            x = layer(weights @ x).tanh()
        return x.square().mean()


def _inputs(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    return torch.randn(ROWS, LENGTH, WIDTH), torch.arange(LENGTH)


def test_a_capture_keeps_no_masks() -> None:
    model, given = _Masked(), _inputs()
    taken = lowtide.measure(lambda: capture(model, given, {}))
    assert taken.peak_bytes < MASK_BYTES


def test_a_call_that_is_captured_again_stays_within_the_budget() -> None:
    """The second call reads what the first one has kept, which makes for another program."""
    model = _Masked()
    plain = copy.deepcopy(model)
    given = _inputs()
    peak_bytes = lowtide.measure(lambda: plain(*given).backward()).peak_bytes
    lowtide.rematerialize(model, given, budget=peak_bytes // 2)
    plain = copy.deepcopy(plain)
    for seed in range(3):
        model.zero_grad()
        plain.zero_grad()
        given = _inputs(seed)
        taken = lowtide.measure(lambda given=given: model(*given).backward())  # type: ignore[misc]
        plain(*given).backward()
        assert taken.peak_bytes <= peak_bytes // 2
        for ours, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            assert ours.grad is not None and wanted.grad is not None
            assert torch.equal(ours.grad, wanted.grad)


def test_questions_about_large_masks_are_answered() -> None:
    model = _Masked(asks=True)
    plain = copy.deepcopy(model)
    x, positions = _inputs()
    model(x, positions), plain(x, positions)  # keep what they keep
    lowtide.rematerialize(model, (x, positions), budget="60%")
    for given in (positions, positions // 4, positions):
        model.zero_grad()
        plain.zero_grad()
        loss, wanted = model(x, given), plain(x, given)
        loss.backward()
        wanted.backward()
        assert torch.equal(loss, wanted)
        assert torch.equal(model.layers[0].weight.grad, plain.layers[0].weight.grad)
    assert len(lowtide.plans(model)) == 2  # with another answer, another program
    taken = lowtide.measure(lambda: capture(plain, (x, positions), {}))
    assert taken.peak_bytes < 8 * MASK_BYTES  # what one question takes, and not all of them


def test_values_that_several_operators_read_are_computed_once_for_a_question() -> None:
    calls = []

    def doubled(tensor: torch.Tensor) -> torch.Tensor:
        calls.append(tensor)
        return tensor * 2

    values = KnownValues()
    first = Provenance(leaf=0, depends_on_input=True)
    values.give(first, torch.ones(1 << 20))
    second = Provenance(doubled, (first,))
    third = Provenance(torch.add, (second, second))
    total = Provenance(torch.sum, (Provenance(torch.add, (third, second)),))
    assert values.of(total) == 6 * (1 << 20)
    assert values.of(total) == 6 * (1 << 20)
    assert len(calls) == 1
