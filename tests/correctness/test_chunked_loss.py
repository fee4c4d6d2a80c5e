"""Losses in pieces: as eager's but for the order of sums over rows, without logits as a whole, and nothing else changed."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lowtide
from lowtide.cli.main import main
from lowtide.planning.chunked import ChunkedLoss
from tests.support.records import relative_difference
from tests.support.training import QUICK, compare_training, make

CLASSES, WIDTH, BATCH, LENGTH = 90, 12, 4, 25
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}
Change = Callable[[torch.Tensor], torch.Tensor]


class Language(nn.Module):
    """A small language model that returns its loss; ``options`` are those of the cross-entropy."""

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        *,
        bias: bool = False,
        tied: bool = False,
        shifted: bool = False,
        change: Change = lambda logits: logits,
        weight: torch.Tensor | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.embedding, self.body = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight
        self.shifted, self.change, self.options = shifted, change, options
        self.register_buffer("weight", weight)
        self.to(dtype)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(torch.tanh(self.body(self.embedding(tokens))))
        if self.shifted:
            logits, labels = logits[:, :-1].contiguous(), labels[:, 1:].contiguous()
        labels = labels.masked_fill(labels < 0, self.options.get("ignore_index", -100))
        logits = self.change(logits).view(-1, CLASSES)
        return F.cross_entropy(logits, labels.view(-1), weight=self.weight, **self.options)


class Projection(nn.Module):
    """Just a head and its loss, with a gradient for the hidden states; ``several``: a loss at the same logits twice."""

    def __init__(self, width: int, classes: int, frozen: bool = False, several: bool = False) -> None:
        super().__init__()
        self.head, self.several = nn.Linear(width, classes, bias=False), several
        self.head.weight.requires_grad_(not frozen)

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(hidden)
        loss = F.cross_entropy(logits, labels)
        return loss + F.cross_entropy(logits, labels.flip(0), label_smoothing=0.2) if self.several else loss


def _tokens(iteration: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    generator = torch.Generator().manual_seed(iteration)
    tokens, labels = (torch.randint(0, CLASSES, (BATCH, LENGTH), generator=generator) for _ in range(2))
    labels[0, :7] = -100
    return (tokens, labels), {}


def _compare(model: Callable[[], nn.Module], dtype: torch.dtype, *, inputs: Any = _tokens, pieces: int = 8) -> None:
    how: dict[str, Any] = {"tolerance": TOLERANCE[dtype], "iterations": 2, "chunked_loss": True}
    for outcome in compare_training(model, inputs, budgets=("100%", "85%"), **how):
        (plan,) = lowtide.plans(outcome.model)
        assert [loss.pieces for loss in plan.chunked] == [pieces]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("reduction", "shifted"), [("mean", True), ("sum", False)])
def test_losses_and_gradients_are_as_in_eager(dtype: torch.dtype, reduction: str, shifted: bool) -> None:
    _compare(lambda: Language(dtype, bias=True, tied=True, shifted=shifted, reduction=reduction), dtype)


VARIANTS: dict[str, dict[str, Any]] = {
    "label smoothing": {"label_smoothing": 0.1, "bias": True},
    "class weights": {"weight": torch.linspace(0.5, 2, CLASSES, dtype=torch.float64)},
    "both": {"label_smoothing": 0.1, "weight": torch.linspace(0.5, 2, CLASSES, dtype=torch.float64), "shifted": True},
    "a loss for each row": {"reduction": "none"},
    "another ignored label": {"ignore_index": 3},
    "scaled and capped": {"change": lambda logits: 3 * torch.tanh(logits * 2 / 3), "shifted": True, "tied": True},
}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=list(VARIANTS))
def test_what_is_computed_row_by_row_is_cut(variant: dict[str, Any]) -> None:
    _compare(lambda: Language(torch.float64, **variant), torch.float64, pieces=8)


def test_rows_that_are_cut_off_twice() -> None:
    class Inner(Language):
        def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            logits, labels = self.head(torch.tanh(self.body(self.embedding(tokens))))[1:, 2:-1], labels[1:, 3:]
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    _compare(lambda: Inner(torch.float64, bias=True), torch.float64)


def test_logits_of_16_bits_are_upcast_in_pieces() -> None:
    class Autocast(Language):
        def forward(self, *args: Any) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(*args)

    _compare(lambda: Autocast(tied=True, shifted=True, change=torch.Tensor.float), torch.bfloat16)


def _rows(iteration: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    generator = torch.Generator().manual_seed(iteration)
    hidden = torch.randn(101, 16, generator=generator, dtype=torch.float64).requires_grad_()
    return (hidden, torch.randint(0, 40, (101,), generator=generator)), {}


@pytest.mark.parametrize("options", [{}, {"frozen": True}, {"several": True}], ids=str)
def test_gradients_of_hidden_states_and_frozen_weights(options: dict[str, bool]) -> None:
    _compare(lambda: Projection(16, 40, **options).double(), torch.float64, inputs=_rows, pieces=3)


def test_other_forms_of_projections_and_what_is_asked_of_each_row() -> None:
    """A weight that is not transposed, and beside the loss, before it, a penalty and the share of rows that are right."""

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16, 40))

        def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> Any:
            logits = hidden @ self.weight
            penalty = 1e-4 * logits.logsumexp(-1).square().mean()
            right = (logits.argmax(-1) == labels).double().mean()
            return F.cross_entropy(logits * 0.5, labels) + penalty, right

    def loss(output: Any) -> torch.Tensor:
        return output[0].square()  # another gradient than 1

    (outcome,) = compare_training(
        lambda: Product().double(), _rows, loss, budgets=("100%",), tolerance=1e-12, chunked_loss=True
    )
    assert [one.pieces for one in lowtide.plans(outcome.model)[0].chunked] == [3]


def test_a_scaled_loss_scales_in_the_backward_pass() -> None:
    """The gradient of the loss is what arrives, not 1: where it is put in later, small numbers of float16 are lost."""

    def loss(output: torch.Tensor) -> torch.Tensor:
        return output * 65536.0

    (outcome,) = compare_training(
        lambda: Language(shifted=True), _tokens, loss, budgets=("90%",), iterations=2, tolerance=2e-6, chunked_loss=True
    )
    assert lowtide.plans(outcome.model)[0].chunked


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_language_models_of_transformers_that_return_the_loss(kind: str) -> None:
    transformers = pytest.importorskip("transformers")

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            if kind == "gpt2":
                config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=96, n_positions=32)
                self.model = transformers.GPT2LMHeadModel(config)
            else:
                sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 96}
                self.model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=1, **sizes))

        def forward(self, tokens: torch.Tensor) -> Any:
            return self.model(tokens, labels=tokens, use_cache=False).loss

    def tokens(iteration: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (torch.randint(0, 96, (3, 20), generator=torch.Generator().manual_seed(iteration)),), {}

    _compare(Loss, torch.float32, inputs=tokens, pieces=6)


def test_the_peak_falls_by_what_logits_take() -> None:
    """Logits and log-softmax, or the gradients of both, are never there as a whole; ``compare_training`` measures the peak."""
    width, classes, count = 32, 2048, 512

    def inputs(iteration: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        generator = torch.Generator().manual_seed(iteration)
        hidden = torch.randn(count, width, generator=generator).requires_grad_()
        return (hidden, torch.randint(0, classes, (count,), generator=generator)), {}

    logits = 4 * count * classes
    least = []
    for chunked in (False, True):
        with pytest.raises(lowtide.InfeasibleBudgetError) as raised:
            lowtide.rematerialize(make(lambda: Projection(width, classes)), *inputs(0), budget=1, chunked_loss=chunked)
        least.append(raised.value.minimum_bytes)
    assert least[0] > 2 * logits
    assert least[1] < logits // 4 + 3 * 4 * width * classes
    (outcome,) = compare_training(
        lambda: Projection(width, classes), inputs, budgets=(least[1],), tolerance=2e-6, chunked_loss=True,
        planner=QUICK,
    )  # fmt: skip
    assert outcome.measured_bytes == lowtide.plans(outcome.model)[0].peak_bytes


def _said(caplog: pytest.LogCaptureFixture, model: nn.Module, *args: Any) -> str:
    """The log's one line on a loss that stays whole."""
    with caplog.at_level(logging.WARNING):
        lowtide.rematerialize(model, args, budget="100%", chunked_loss=True)
        model(*(each[:-1] for each in args))  # of another shape
    plan, _ = lowtide.plans(model)
    (line,) = [record.message for record in caplog.records if "chunked_loss" in record.message]
    assert plan.chunked == () and "loss" not in plan.as_report().details
    return line


def test_returned_logits_stay_whole(caplog: pytest.LogCaptureFixture) -> None:
    class Both(Projection):
        def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> Any:
            logits = self.head(hidden)
            return F.cross_entropy(logits, labels), logits

    line = _said(caplog, Both(4, 9), torch.randn(5, 4), torch.arange(5))
    assert line.endswith(
        "a loss of Both: the logits [5, 9] are returned, so they exist as a whole; return the loss alone"
    )


def test_logits_that_others_read_stay_whole(caplog: pytest.LogCaptureFixture) -> None:
    class Sorted(Projection):
        def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> Any:
            logits = self.head(hidden)
            return F.cross_entropy(logits, labels) + logits.cumsum(0).mean()

    assert "aten.cumsum.default reads the logits [5, 9]" in _said(
        caplog, Sorted(4, 9), torch.randn(5, 4), torch.arange(5)
    )


def test_small_logits_stay_whole(caplog: pytest.LogCaptureFixture) -> None:
    line = _said(caplog, Projection(9, 9), torch.randn(5, 9), torch.arange(5))
    assert "no larger than the hidden states (9 classes from 9)" in line


@pytest.mark.parametrize("normed", [False, True])
def test_a_loss_without_a_projection_stays_as_it_is(caplog: pytest.LogCaptureFixture, normed: bool) -> None:
    class Other(Projection):
        def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            logits = self.head(hidden)
            return F.cross_entropy(F.layer_norm(logits, (9,)), labels) if normed else logits.square().mean()

    line = _said(caplog, Other(4, 9), torch.randn(5, 4), torch.arange(5))
    assert "Other computes no matrix product whose rows go through log_softmax to nll_loss" in line


def test_one_row_of_logits_stays_whole(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        lowtide.rematerialize(Projection(4, 9), (torch.randn(1, 4), torch.arange(1)), budget="100%", chunked_loss=True)
    assert "there is just one row of logits" in caplog.text


def test_without_being_asked_for_nothing_changes() -> None:
    for outcome in compare_training(lambda: Language(tied=True, shifted=True), _tokens, budgets=("100%", "90%")):
        assert lowtide.plans(outcome.model)[0].chunked == ()


def test_the_plan_states_the_deviation() -> None:
    plan = lowtide.plan(make(Language), *_tokens(0), budget="100%", chunked_loss=True)
    assert plan.chunked == (ChunkedLoss(8, BATCH * LENGTH, CLASSES, "float32"),)
    (loss,) = plan.chunked
    assert (loss.bound, loss.typical) == (2 * BATCH * LENGTH * 2.0**-24, 2 * (BATCH * LENGTH) ** 0.5 * 2.0**-24)
    assert "loss in 8 pieces: sums over 100 rows are in another order than eager's" in " ".join(str(plan).split())
    assert "typically within 1.2e-06 of their terms, at most 1.2e-05" in str(plan)


class Heads(nn.Module):
    """Two losses of the same hidden states, the second of half of them and among fewer classes."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.kinds = nn.Linear(WIDTH, CLASSES, bias=False), nn.Linear(WIDTH, CLASSES // 2, bias=False)

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        half = len(hidden) // 2
        kinds = F.cross_entropy(self.kinds(hidden[:half]), labels[:half] // 2)
        return F.cross_entropy(self.words(hidden), labels) + kinds


def test_the_plan_states_each_loss() -> None:
    sample = (torch.randn(100, WIDTH), torch.arange(100) % CLASSES)
    plan = lowtide.plan(make(Heads), sample, budget="100%", chunked_loss=True)
    assert {(loss.rows, loss.classes) for loss in plan.chunked} == {(100, CLASSES), (50, CLASSES // 2)}
    assert len(plan.chunked) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_within_the_bound(dtype: torch.dtype) -> None:
    """The gradient of the weight beside the sum of its terms' magnitudes, for each element."""
    model, plain = (make(lambda: Projection(8, 64)).to(dtype) for _ in range(2))
    hidden, labels = torch.randn(300, 8, generator=torch.Generator().manual_seed(0)).to(dtype), torch.arange(300) % 64
    lowtide.rematerialize(model, (hidden, labels), budget="100%", chunked_loss=True)
    model(hidden, labels).backward()
    plain(hidden, labels).backward()
    shares = (torch.softmax(plain.head(hidden).double(), 1) - F.one_hot(labels, 64)).abs() / 300
    magnitudes = shares.T @ hidden.double().abs()
    apart = (model.head.weight.grad.double() - plain.head.weight.grad.double()).abs() / magnitudes
    (loss,) = lowtide.plans(model)[0].chunked
    assert loss.pieces > 1  # whose sums are in another order on some processors, in the same on others
    assert apart.mean() <= loss.typical < loss.bound
    assert apart.max() <= loss.bound


def test_each_shape_has_its_own_pieces() -> None:
    def inputs(iteration: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        (tokens, labels), _ = _tokens(iteration)
        return (tokens[:, : LENGTH - iteration], labels[:, : LENGTH - iteration]), {}

    model = make(lambda: Language(torch.float64, shifted=True))
    expected = make(lambda: Language(torch.float64, shifted=True))
    lowtide.rematerialize(model, budget="70%", chunked_loss=True, offload="disk")
    for iteration in range(4):
        for each in (model, expected):
            each(*inputs(iteration)[0]).backward()
    assert [plan.chunked[0].rows for plan in lowtide.plans(model)] == [BATCH * (LENGTH - 1 - i) for i in range(4)]
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-14)


def test_a_part_of_a_model_that_computes_all_of_a_loss(caplog: pytest.LogCaptureFixture) -> None:
    class Deciding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
            self.last = Projection(16, 40)

        def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            hidden = self.body(hidden)
            return self.last(hidden * 2 if hidden.sum() > 1e6 else hidden, labels)

    model, expected = (make(lambda: Deciding().double()) for _ in range(2))
    lowtide.rematerialize(model, budget="100%", chunked_loss=True)
    for each in (model, expected):
        each(*_rows(0)[0]).backward()
    assert [loss.pieces for plan in lowtide.plans(model) for loss in plan.chunked] == [3]
    assert relative_difference(model.last.head.weight.grad, expected.last.head.weight.grad) < 1e-12
    (line,) = [record.message for record in caplog.records if "loss in pieces" in record.message]
    assert "its submodules are planned, with a loss in pieces where one computes all of it" in line


def test_graphs_of_torch_compile_take_the_option() -> None:
    model, expected = (make(lambda: Language(torch.float64, shifted=True)) for _ in range(2))
    options = {"budget": "90%", "compiler": "eager", "chunked_loss": True}
    compiled: Any = torch.compile(model, backend="lowtide", options=options)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        compiled(*_tokens(0)[0]).backward()
    assert sum(event.name == "aten::nll_loss_forward" for event in profiler.events()) > 1
    expected(*_tokens(0)[0]).backward()
    pairs = [(ours.grad, theirs.grad) for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True)]
    assert all(relative_difference(ours, theirs) < 1e-12 for ours, theirs in pairs)


def test_the_command_line_takes_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    module = "tests.correctness.test_chunked_loss:sample"
    assert main(["plan", module, "--budget", "100%", "--chunked-loss", "-o", str(tmp_path / "plan.json")]) == 0
    assert "in 8 pieces: sums over 100 rows" in capsys.readouterr().out
    assert [loss.pieces for loss in lowtide.Plan.load(tmp_path / "plan.json").chunked] == [8]


def sample() -> tuple[nn.Module, tuple[Any, ...]]:
    """What the command plans."""
    return make(Language), _tokens(0)[0]


def test_it_must_be_true_or_false() -> None:
    with pytest.raises(lowtide.PlanError, match="chunked_loss='auto' is unknown; use True or False"):
        lowtide.rematerialize(make(Language), budget="100%", chunked_loss="auto")  # type: ignore[arg-type]
