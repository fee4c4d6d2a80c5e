"""Models whose programs do not come again: under ``lowtide.online`` instead of captured in every call, to the bit."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import lowtide
from lowtide.runtime.online_instead import OnlineInstead
from lowtide.runtime.programs import kin
from lowtide.settings import Settings

WIDTH = 32


class _Decoder(nn.Module):
    """Teacher forcing: which token comes next, Python's generator decides at each of the steps."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner = nn.Parameter(torch.randn(20, WIDTH)), nn.Parameter(torch.randn(WIDTH, WIDTH) / 6)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, token, losses = torch.zeros(len(tokens), WIDTH), tokens[:, 0], []
        for place in range(1, tokens.shape[1]):
            hidden = torch.tanh(self.table[token] + torch.sigmoid(hidden) @ self.inner)
            logits = hidden @ self.table.t()
            losses.append(nn.functional.cross_entropy(logits, tokens[:, place]))
            token = tokens[:, place] if random.random() < 0.5 else logits.argmax(1)
        return torch.stack(losses).mean()


class _Lengths(nn.Module):
    """Sums over rows up to lengths that Python reads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(torch.tanh(x @ self.weight) @ self.weight)
        return torch.stack([row[:n].sum() for row, n in zip(hidden, lengths.tolist(), strict=True)]).square().mean()


def _tokens(step: int) -> tuple[torch.Tensor, ...]:
    return (torch.randint(0, 20, (32, 9), generator=torch.Generator().manual_seed(step)),)


def _rows(step: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(6, 40, WIDTH, generator=generator), torch.randint(1, 41, (6,), generator=generator)


def _captures(caplog: pytest.LogCaptureFixture, model: nn.Module) -> int:
    return caplog.text.count(f"planned {type(model).__name__}")


def _trained(
    plain: nn.Module, given: Callable[[int], tuple[torch.Tensor, ...]], steps: int, budget: str | int
) -> nn.Module:
    """The planned model, after steps in which loss and gradients were equal to eager's, each within a budget in bytes."""
    model = copy.deepcopy(plain)
    lowtide.rematerialize(model, budget=budget)
    for step in range(steps):
        results = []
        for one in (plain, model):
            random.seed(step)
            one.zero_grad(set_to_none=False)
            peak_bytes, loss = _measured(one, given(step))
            results.append([loss, *(parameter.grad for parameter in one.parameters())])
        assert all(map(torch.equal, *results))
        if isinstance(budget, int) and model.forward.is_online:
            assert peak_bytes <= budget
    return model


def _budget(model: nn.Module, given: Callable[[int], tuple[torch.Tensor, ...]], share: float) -> int:
    return int(share * _measured(copy.deepcopy(model), given(0))[0])


def _measured(model: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[int, torch.Tensor]:
    """Peak of a step, and its loss."""
    losses: list[torch.Tensor] = []

    def run() -> None:
        losses.append(model(*args))
        losses[0].backward()

    return lowtide.measure(run).peak_bytes, losses[0].detach()


@pytest.mark.parametrize("percent", [False, True])
def test_draws_that_decide_at_each_step_of_a_decoder(percent: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "lowtide")
    model = _Decoder()
    model = _trained(model, _tokens, 8, "75%" if percent else _budget(model, _tokens, 0.8))
    assert "would be captured in most calls, so it runs under lowtide.online" in caplog.text
    assert model.forward.is_online and _captures(caplog, model) == 1


def test_lengths_that_never_come_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "lowtide")
    model = _Lengths()
    model = _trained(model, _rows, 24, _budget(model, _rows, 0.9))
    assert "would be captured in most calls, so it runs under lowtide.online" in caplog.text
    assert model.forward.is_online and model.forward.recaptures.novelty.seconds > 0


def test_a_percentage_is_of_the_largest_call(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "lowtide")

    def longer(step: int) -> tuple[torch.Tensor, ...]:
        return (_tokens(step)[0].repeat(1, 2 if step == 8 else 1),)

    model = _trained(_Decoder(), longer, 8, "75%")
    assert model.forward.is_online
    before, planned = model.forward._instead.budget_bytes, _captures(caplog, model)
    for step in (8, 9):
        random.seed(step)
        model(*longer(step)).backward()
    assert _captures(caplog, model) == planned + 1
    assert model.forward.is_online and model.forward._instead.budget_bytes > 1.5 * before


def test_where_the_online_mode_takes_longer_calls_are_captured(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OnlineInstead, "takes_over", lambda self, budget_bytes, *_: _given(self, budget_bytes))
    model = _trained(_Decoder(), _tokens, 12, "75%")
    assert "is captured in every call: lowtide.online takes longer" in caplog.text
    assert not model.forward.is_online and model.forward.entries


def _given(instead: OnlineInstead, budget_bytes: int) -> None:
    instead.budget_bytes, instead._seconds = budget_bytes, 0.0


def test_what_is_a_part_of_a_larger_step_is_captured_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    """What was evicted there others would have to rebuild."""
    scale = torch.ones(WIDTH, requires_grad=True)

    def scaled(step: int) -> tuple[torch.Tensor, ...]:
        x, lengths = _rows(step)
        return x * scale, lengths

    model = _trained(_Lengths(), scaled, 20, "90%")
    assert not model.forward.is_online and model.forward.entries


@pytest.mark.parametrize(
    "given", [{"arena": True}, {"chunked_loss": True}, {"on_capture_error": "error"}, {"offload": "disk"}]
)
def test_what_was_asked_for_stays(given: dict[str, object]) -> None:
    assert not OnlineInstead(Settings(**{"budget": "60%", "on_capture_error": "parts", **given})).is_possible([])  # type: ignore[arg-type]


def test_without_a_budget_there_is_no_way_out() -> None:
    instead = OnlineInstead(Settings(budget="60%", on_capture_error="parts"))
    assert instead.is_possible([])
    instead.takes_over(0, 1.0, torch.device("cpu"))
    assert not instead.is_possible([])


class _Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, WIDTH))
        self.recurrent = nn.LSTM(WIDTH, 16, batch_first=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        found, _ = self.recurrent(pack_padded_sequence(self.body(x), lengths, batch_first=True))
        return found.data.square().mean()


def test_symbols_are_not_tried_again_where_no_other_call_has_the_same_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[object] = []
    capture_family = kin.capture_family
    monkeypatch.setattr(
        kin, "capture_family", lambda *args, **given: tried.append(args) or capture_family(*args, **given)
    )

    def packed(step: int) -> tuple[torch.Tensor, ...]:
        lengths = torch.tensor([20 + 2 * step, 18 + step, 9])
        return torch.randn(3, 20 + 2 * step, WIDTH, generator=torch.Generator().manual_seed(step)), lengths

    _trained(_Packed(), packed, 6, "95%")
    assert len(tried) == 2
