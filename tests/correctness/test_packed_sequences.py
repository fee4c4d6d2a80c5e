"""Row: packed sequences (``pack_padded_sequence``) around recurrent layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import lowtide
from lowtide.capture import capture
from tests.support.networks import generator
from tests.support.training import compare_training
from tests.support.wide import is_wide

LENGTHS = [12, 12, 9, 7, 7, 3, 1, 1]


class _Tagger(nn.Module):
    def __init__(self, kind: str = "LSTM", padding: float = 0.0, total: int | None = None, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 32)
        self.layers = getattr(nn, kind)(32, 24, **options)
        self.head = nn.Linear(24 * (1 + self.layers.bidirectional), 8)
        self.padding, self.total = padding, total

    def forward(self, tokens: torch.Tensor, lengths: Any) -> torch.Tensor:
        first = self.layers.batch_first
        padded = self.table(tokens) if first else self.table(tokens).transpose(0, 1)
        packed = pack_padded_sequence(padded, lengths, batch_first=first, enforce_sorted=lengths[0] == 12)
        results, _ = self.layers(packed)
        tall, _ = pad_packed_sequence(results, first, self.padding, self.total)
        return self.head(tall.tanh()).square().mean()


def _tokens(iteration: int, lengths: Any) -> Any:
    return (torch.randint(0, 50, (len(lengths), max(map(int, lengths))), generator=generator(iteration)), lengths), {}


def _assert_same_gradients(plain: nn.Module, own: nn.Module, arguments: Any) -> None:
    """After a step of both."""
    for each in (plain, own):
        each.zero_grad()
        each(*arguments).backward()
    for one, two in zip(plain.parameters(), own.parameters(), strict=True):
        assert one.grad is not None and two.grad is not None
        assert torch.equal(one.grad, two.grad)


@pytest.mark.parametrize("lengths", [LENGTHS, torch.tensor(LENGTHS[::-1]), [12] * 8], ids=["list", "unsorted", "equal"])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_equal_to_eager(kind: str, lengths: Any) -> None:
    options: dict[str, Any] = {"num_layers": 2, "bidirectional": True, "dropout": 0.3, "batch_first": kind != "GRU"}
    options |= {"padding": -1.0, "total": 15} if kind == "RNN" else {}
    compare_training(lambda: _Tagger(kind, **options), lambda number: _tokens(number, lengths), budgets=("100%",))


def test_states_and_packed_data() -> None:
    """Layers between which the user's own operators run on packed rows, from a state that needs a gradient."""

    class Stacked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lower, self.upper = nn.LSTM(32, 24), nn.GRU(24, 24, 2)
            self.first = nn.Parameter(torch.randn(2, 1, 24))
            self.between = nn.Linear(24, 24)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> Any:
            packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
            results, (h, c) = self.lower(packed)
            packed = PackedSequence(self.between(results.data).relu(), *results[1:])
            results, last = self.upper(packed, self.first.expand(-1, len(lengths), -1).contiguous())
            return {"rows": results.data, "h": h, "c": c, "last": last}

    lengths = torch.tensor([3, 9, 9, 1, 6])
    inputs = lambda number: ((torch.randn(9, 5, 32, generator=generator(number)), lengths), {})  # noqa: E731
    compare_training(Stacked, inputs, budgets=("100%", "90%"))


@pytest.mark.parametrize("length", [6, 60])
def test_graph_does_not_grow_with_lengths(length: int) -> None:
    lengths = [length, length - 1, 3]
    program = capture(_Tagger(num_layers=2, bidirectional=True, batch_first=True), *_tokens(0, lengths)).program
    targets = [op.target for op in program.graph.ops]
    assert (
        targets.count("lowtide_recurrent.forward.default") == targets.count("lowtide_recurrent.backward.default") == 4
    )
    assert len(targets) < 100


@pytest.mark.parametrize("as_list", [True, False])
def test_other_lengths_in_every_step(as_list: bool) -> None:
    """Nothing is known beforehand of lengths: each call is planned by what is known of others, within the budget."""

    def inputs(number: int) -> Any:
        lengths = torch.randint(4, 24, (8,), generator=generator(number)).sort(descending=True).values
        return _tokens(number, lengths.tolist() if as_list else lengths)[0]

    def model() -> nn.Module:
        torch.manual_seed(0)
        return _Tagger(bidirectional=True, batch_first=True)

    plain, own = model(), model()
    lowtide.rematerialize(own, budget="95%", planner="auto{effort=2}")
    for number in range(12 if is_wide() else 7):
        _assert_same_gradients(plain, own, inputs(number))
    plans = lowtide.plans(own)
    assert own.forward.parts is None and len(plans) > 1  # type: ignore[union-attr]
    assert all(plan.peak_bytes <= plan.budget_bytes for plan in plans)
    assert "adapted" in {plan.planner for plan in plans}


def test_encoder_of_two_sentences() -> None:
    """Eager adds up the terms of all steps of both calls one after the other: its own code does."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.layers, self.block = nn.Embedding(50, 32), nn.LSTM(32, 24), nn.Sequential()
            for _ in range(3):
                self.block.extend([nn.Linear(24, 24), nn.Tanh()])

        def forward(self, one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
            def encoded(tokens: torch.Tensor, lengths: list[int]) -> torch.Tensor:
                packed = pack_padded_sequence(self.table(tokens).transpose(0, 1), lengths)
                return self.block(self.layers(packed)[1][0][-1])

            return (encoded(one, LENGTHS) - encoded(two, LENGTHS)).square().mean()

    def model() -> nn.Module:
        torch.manual_seed(0)
        return Pair()

    with pytest.raises(lowtide.CaptureError, match="own code"):
        capture(model(), [_tokens(number, LENGTHS)[0][0] for number in range(2)])
    plain, own = model(), model()
    lowtide.rematerialize(own, budget="100%")
    for number in range(4):
        _assert_same_gradients(plain, own, [_tokens(2 * number + place, LENGTHS)[0][0] for place in range(2)])
