"""Calls of many shapes: captured once, planned at once, equal to the bit and within the budget at every shape."""

from __future__ import annotations

import builtins
import functools
import logging
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.api import runtime_of
from lowtide.capture import capture
from lowtide.capture.family import SymbolicFamily, capture_family
from tests.support.beside import plain_and_planned
from tests.support.networks import Generated, Residual, WithLoss, perceptron
from tests.support.records import assert_same_records, run_training, scalar_loss, training_step
from tests.support.training import copy_inputs, make
from tests.support.versions import needs_2_13
from tests.support.wide import pairs

STEP = training_step(scalar_loss)
SHAPES = [(4, 17), (4, 9), (4, 21), (5, 17), (6, 29), (4, 17), (4, 13), (2, 41)]


class _Attention(nn.Module):
    """A causal transformer block, which builds its mask and its positions from the sizes of the call."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(50, 32), nn.Embedding(64, 32)
        self.qkv, self.out, self.drop = nn.Linear(32, 96), nn.Linear(32, 32), nn.Dropout(0.2)
        self.mlp = Residual(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 32)))
        self.head = nn.Linear(32, 50)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        batch, length = tokens.shape
        x = self.embed(tokens) + self.place(torch.arange(length))
        q, k, v = self.qkv(x).view(batch, length, 3, 4, 8).permute(2, 0, 3, 1, 4)
        allowed = torch.ones(length, length, dtype=torch.bool).tril()
        if mask is not None and not mask.all():
            allowed = allowed & mask[:, None, None, :].bool()
        weights = self.drop((q @ k.transpose(-1, -2) / 8**0.5).masked_fill(~allowed, -1e9).softmax(-1))
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, 32))
        return nn.functional.cross_entropy(self.head(self.mlp(x)).flatten(0, 1), tokens.flatten())


def _tokens(shape: tuple[int, int], seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 50, shape, generator=torch.Generator().manual_seed(seed))


def _calls(iteration: int) -> Any:
    return (_tokens(SHAPES[iteration], iteration),), {}


def _families(model: nn.Module) -> list[Any]:
    runtime = runtime_of(model)
    assert runtime is not None
    return [branch.family for kin in runtime._kins._kinds.values() for branch in kin.branches]


def _count_captures(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes that are captured by themselves from now on."""
    from lowtide import pipeline

    shapes: list[tuple[int, ...]] = []
    original = pipeline.capture

    def counted(model: nn.Module, args: Any, *rest: Any, **options: Any) -> Any:
        shapes.append(tuple(args[0].shape))
        return original(model, args, *rest, **options)

    monkeypatch.setattr(pipeline, "capture", counted)
    return shapes


@needs_2_13
@pytest.mark.parametrize(("dynamic", "planning"), pairs((None, True), ("background", "wait")))
def test_every_shape_is_as_eager_and_within_the_budget(
    dynamic: bool | None, planning: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = _count_captures(monkeypatch)
    model = make(_Attention)
    lowtide.rematerialize(model, *_calls(0), budget="60%", dynamic=dynamic, planning=planning)
    records = run_training(model, _calls, STEP, len(SHAPES))
    assert_same_records(records, run_training(make(_Attention), _calls, STEP, len(SHAPES)))
    assert captured == SHAPES[: 1 if dynamic else 2]  # with sizes as numbers
    for iteration, shape in enumerate(SHAPES):
        args, kwargs = copy_inputs(_calls(iteration))
        model.zero_grad(set_to_none=True)
        peak = lowtide.measure(STEP, model, args, kwargs).peak_bytes
        plan = runtime_of(model).latest.plan  # type: ignore[union-attr]
        assert peak == plan.peak_bytes <= plan.budget_bytes, shape
    lowtide.restore(model)


@needs_2_13
@pytest.mark.parametrize(
    ("width", "first"),
    [(None, 0), pytest.param(64, 0, marks=pytest.mark.slow), (64, 3)],
    ids=["all but the last column", "of a wide table", "further below"],
)
def test_shapes_of_slices(width: int | None, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that lie apart, as those of ``tokens[:, :-1]``: by as much as the table that they are cut from is wide."""
    captured = _count_captures(monkeypatch)

    def tables(iteration: int) -> Any:
        rows, columns = SHAPES[iteration]
        return (_tokens((first + rows, width or columns + 1), iteration), columns), {}

    def step(model: nn.Module, args: Any, kwargs: Any) -> Any:
        table, columns = args
        return STEP(model, (table[first:, :columns],), kwargs)

    (table, columns), _ = tables(0)
    model = lowtide.rematerialize(make(_Attention), (table[first:, :columns],), budget="60%", planning="wait")
    records = run_training(model, tables, step, len(SHAPES))
    assert_same_records(records, run_training(make(_Attention), tables, step, len(SHAPES)))
    assert captured == SHAPES[:2]


class _WithLogits(_Attention):
    """Returns its loss beside what that is computed from, of which callers may compute another one."""

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        logits = self.head(self.mlp(self.embed(tokens)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()), logits


@needs_2_13
def test_gradients_arrive_at_other_sizes_as_they_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where that was another way than guessed: each shape was captured by itself, once for either way."""
    captured = _count_captures(monkeypatch)

    def own_loss(model: nn.Module, args: Any, kwargs: Any) -> Any:
        _, logits = model(*args)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), args[0].flatten(), label_smoothing=0.1)
        loss.backward()
        return loss

    def its_loss(model: nn.Module, args: Any, kwargs: Any) -> Any:
        loss, _ = model(*args)
        loss.backward()
        return loss

    model, plain = (
        lowtide.rematerialize(make(_WithLogits), *_calls(0), budget="70%", planning="wait"),
        make(_WithLogits),
    )
    run_training(model, _calls, own_loss, len(SHAPES))
    run_training(plain, _calls, own_loss, len(SHAPES))
    assert captured == [SHAPES[0], *SHAPES[:2]]
    for step in (its_loss, own_loss):
        records = run_training(model, _calls, step, len(SHAPES))
        assert_same_records(records, run_training(plain, _calls, step, len(SHAPES)))


@functools.cache
def _family() -> SymbolicFamily:
    """Of rows and columns."""
    tokens = _tokens((5, 14))
    return capture_family(make(_Attention), (tokens, torch.ones_like(tokens)), {}, [(0, 0), (0, 1), (1, 0), (1, 1)])


@needs_2_13
def test_programs_of_a_family_are_those_of_captures() -> None:
    model = make(_Attention)
    for shape in [(5, 13), (2, 17), (7, 11), (9, 35)]:
        captured = capture(model, (_tokens(shape), torch.ones(shape, dtype=torch.long)))
        assert _family().confirmed_by(captured, (shape, shape))


@needs_2_13
@pytest.mark.parametrize("shape", [(4, 8), (3, 32), (16, 4), (5, 10)], ids=["width", "its triple", "inner", "tokens"])
def test_as_many_rows_as_the_model_is_wide_make_for_no_other_program(shape: tuple[int, int]) -> None:
    captured = capture(make(_Attention), (_tokens(shape), torch.ones(shape, dtype=torch.long)))
    assert _family().confirmed_by(captured, (shape, shape))


@pytest.mark.parametrize(
    "shapes",
    [((5, 13), (5, 12)), ((1, 13), (1, 13)), ((5, 1), (5, 1)), ((5, 0), (5, 0))],
    ids=["unequal", "one row", "one column", "empty"],
)
def test_sizes_that_make_for_another_program_are_no_members(shapes: Any) -> None:
    assert _family().member(((5, 14), (5, 14)), lambda *_: None) is not None
    assert _family().member(shapes, lambda *_: None) is None


class _Branching(nn.Module):
    """Another program for long rows, for square inputs, and where the mask leaves something out."""

    def __init__(self) -> None:
        super().__init__()
        self.short, self.long, self.square = perceptron(2), perceptron(3), perceptron(1)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == x.shape[1]:
            x = self.square(x)
        x = self.long(x) if x.shape[1] > 20 else self.short(x)
        if not mask.all():
            x = x * mask[..., None]
        if torch.arange(x.shape[1]).sum() > 300:
            x = x.sin()
        return (x * x.shape[1] ** 0.5).sum()


def _branching(iteration: int) -> Any:
    shape = [(3, 10), (4, 11), (5, 12), (4, 19), (3, 21), (9, 9), (5, 30), (6, 13), (7, 7), (4, 26), (4, 26)][iteration]
    mask = torch.ones(shape)
    mask[:, : iteration % 2] = 0
    return (torch.randn(*shape, 32, generator=torch.Generator().manual_seed(iteration)), mask.long()), {}


def test_what_is_asked_about_sizes_is_asked_again() -> None:
    model = lowtide.rematerialize(make(lambda: _Branching()), budget="80%", planner="auto{effort=0}")
    records = run_training(model, _branching, STEP, 11)
    assert_same_records(records, run_training(make(lambda: _Branching()), _branching, STEP, 11))
    assert _families(model)


class _Selecting(nn.Module):
    """Computes on the rows that a mask of rows selects, its loss on the places that another one does."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = perceptron(2), nn.Linear(32, 5)

    def forward(self, x: torch.Tensor, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        x = x.masked_scatter(rows[:, None, None], self.body(x[rows]) / rows.sum())
        return self.head(x)[places].log_softmax(-1)[:, 0].mean() + x[rows.nonzero().squeeze(-1)].square().mean()


@pytest.mark.parametrize("same_shapes", [True, False])
def test_masks_that_select_any_number_of_rows_are_of_one_family(
    same_shapes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one row they are another program, which is captured by itself, and has a family for the other mask."""

    def inputs(iteration: int) -> Any:
        rows, selected = 23 + iteration * (not same_shapes), [7, 9, 12, 11, 1, 8, 3][iteration]
        drawn = torch.Generator().manual_seed(iteration)
        x, places = torch.randn(rows, 13, 32, generator=drawn), torch.rand(rows, 13, generator=drawn) < 0.4
        return (x, torch.arange(rows) % rows < selected, places), {}

    captured = _count_captures(monkeypatch)
    model = lowtide.rematerialize(make(_Selecting), *inputs(0), budget="80%", planner="auto{effort=0}")
    records = run_training(model, inputs, STEP, 7)
    assert_same_records(records, run_training(make(_Selecting), inputs, STEP, 7))
    assert len(_families(model)) == 2
    assert len(captured) == 3  # two that nothing was known of, and that of one row


class _SelectingTwice(nn.Module):
    """Asks twice which rows are selected, and once for rows of which there are none."""

    def __init__(self) -> None:
        super().__init__()
        self.body = perceptron(2)

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, found = self.body(x), []
        for asked in (rows, rows, rows & ~rows):
            found.append(asked.nonzero())
            x = x.index_copy(0, found[-1][:, 0], x[found[-1][:, 0]].tanh())
        return x.square().mean(), *found


def test_rows_that_are_selected_twice_or_never_are_of_one_family(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each answer has memory of its own, also in what is returned."""

    def inputs(iteration: int) -> Any:
        drawn, rows = torch.Generator().manual_seed(iteration), 23 + iteration
        return (torch.randn(rows, 32, generator=drawn), torch.arange(rows) % 4 < 2), {}

    captured = _count_captures(monkeypatch)
    model = lowtide.rematerialize(make(_SelectingTwice), *inputs(0), budget="100%", planner="auto{effort=0}")
    step = training_step(lambda result: result[0])
    records = run_training(model, inputs, step, 6)
    assert_same_records(records, run_training(make(_SelectingTwice), inputs, step, 6))
    assert len(_families(model)) == 1 and len(captured) == 2
    assert "captured as a view" not in caplog.text
    _, one, other, none = model(*inputs(0)[0])
    assert torch.equal(one, other) and one.data_ptr() != other.data_ptr() and none.shape == (0, 1)


class _Shifted(nn.Module):
    """Scores of pairs, of which each row is moved on by one, as for relative positions; without the ``last`` of them."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.last, self.body = last, perceptron(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        scores = (x @ torch.cat([x, x], 1).transpose(1, 2)).unsqueeze(1)[..., self.last :]
        rows, others = scores.shape[2:]
        scores = scores.reshape(len(x), 1, others, rows)[:, :, 1:, :].reshape(len(x), 1, rows, others - 1)
        return scores.index_select(3, torch.arange(rows - 1)).square().mean()


class _Corrected(nn.Module):
    """Writes to some of several versions of its states, and reads them one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = perceptron(1), nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        versions = torch.stack([self.body(x)] * 3)
        versions[1:] += x
        results = [head(versions[number]).tanh() for number, head in enumerate(self.heads)]
        return torch.stack(results).square().mean()


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("factory", [functools.partial(_Shifted, 0), functools.partial(_Shifted, 3), _Corrected])
def test_layouts_and_views_are_those_of_numbers(batch: int, factory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With symbolic sizes, PyTorch gives dimensions of size 1 other strides, and records slices that take all."""

    def inputs(iteration: int) -> Any:
        return (torch.randn(batch, 13 + iteration, 32, generator=torch.Generator().manual_seed(iteration)),), {}

    captured = _count_captures(monkeypatch)
    model = lowtide.rematerialize(make(factory), *inputs(0), budget="100%", planner="auto{effort=0}")
    records = run_training(model, inputs, STEP, 4)
    assert_same_records(records, run_training(make(factory), inputs, STEP, 4))
    assert len(_families(model)) == 1 and len(captured) == 2


class _Remembering(nn.Module):
    """Keeps what depends on the length, in one of several ways that no symbol can stand in for."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.body = how, perceptron(2)
        self.lengths: dict[Any, Any] = {}
        self.last = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        if self.how == "number in an attribute":
            self.last = length
        elif self.how == "key of a table":
            self.lengths[length] = 1
        elif self.how == "text":
            self.lengths[f"length {length}"] = 1
        elif self.how == "tensor in an attribute":
            self.kept = torch.ones(length)
        elif self.how == "numpy":
            x = x * float(torch.tensor([length, length]).sum())
        elif self.how == "item of a list":
            x = x * [0.5, 1.5, 2.0, 3.0][length % 4]
        elif self.how == "loop":
            for index in range(length % 5):
                x = x * (1 + 0.1 * index)
        return self.body(x).square().mean()


@pytest.mark.parametrize(
    "how",
    [
        "number in an attribute",
        pytest.param("key of a table", marks=pytest.mark.slow),
        pytest.param("text", marks=pytest.mark.slow),
        "tensor in an attribute",
        "numpy",
        pytest.param("item of a list", marks=pytest.mark.slow),
        "loop",
    ],
)
def test_programs_that_no_symbol_can_stand_in_for(how: str) -> None:
    """Each shape is captured by itself then, and what is left in the model is what eager leaves."""

    def inputs(iteration: int) -> Any:
        length = [8, 11, 13, 8, 14][iteration]
        return (torch.randn(3, length, 32, generator=torch.Generator().manual_seed(iteration)),), {}

    model, eager = make(lambda: _Remembering(how)), make(lambda: _Remembering(how))
    lowtide.rematerialize(model, budget="80%", planner="auto{effort=0}")
    records = run_training(model, inputs, STEP, 5)
    assert_same_records(records, run_training(eager, inputs, STEP, 5))
    assert (model.lengths, model.last) == (eager.lengths, eager.last)
    assert all(type(key) is type(other) for key, other in zip(model.lengths, eager.lengths, strict=True))
    assert type(model.last) is int


class _Asking(nn.Module):
    """Asks about a size that occurs nowhere in its program."""

    def __init__(self) -> None:
        super().__init__()
        self.body = perceptron(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.arange(3 * x.shape[1] + 1).sum() > 600:
            x = x.sin()
        return self.body(x).square().mean()


def test_questions_have_sizes_of_their_own() -> None:
    def inputs(iteration: int) -> Any:
        length = [5, 6, 7, 9, 15, 17, 8][iteration]
        return (torch.randn(3, length, 32, generator=torch.Generator().manual_seed(iteration)),), {}

    model = lowtide.rematerialize(make(_Asking), budget="100%")
    records = run_training(model, inputs, STEP, 7)
    assert_same_records(records, run_training(make(_Asking), inputs, STEP, 7))
    assert _families(model)


def test_whatever_goes_wrong_with_symbols_each_shape_is_captured_by_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise NotImplementedError("no such symbol")

    caplog.set_level(logging.INFO, "lowtide")
    monkeypatch.setattr("lowtide.runtime.programs.kin.capture_family", fail)
    model = lowtide.rematerialize(make(_Attention), budget="100%", planner="greedy")
    records = run_training(model, _calls, STEP, 4)
    assert_same_records(records, run_training(make(_Attention), _calls, STEP, 4))
    assert "is captured anew for each shape: NotImplementedError: no such symbol" in caplog.text


def test_a_program_that_has_gone_still_ends_its_step() -> None:
    """Between a forward pass and its backward pass, whose gradients arrive otherwise than was planned for."""
    torch.manual_seed(0)
    models = [make(lambda: perceptron(2)) for _ in range(2)]
    lowtide.rematerialize(models[0], budget="100%", max_programs=1)
    for model in models:
        outputs = [model(torch.full((rows, 32), 0.1)) for rows in (3, 4, 5)]
        outputs[0].t().contiguous().t().sum().backward()
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_kinds_that_are_met_no_more_are_forgotten() -> None:
    class Numbered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = perceptron(1)

        def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
            return self.body(x).sum() * len(range(number))

    model = lowtide.rematerialize(Numbered(), budget="100%", planner="keep-all", max_programs=2)
    for number in range(1, 20):
        model(torch.ones(2, 32), number).backward()
    runtime = runtime_of(model)
    assert runtime is not None
    assert len(runtime._kins._kinds) == 16
    assert len(lowtide.plans(model)) == 2


def test_guards_of_python_state_hold_for_families(caplog: pytest.LogCaptureFixture) -> None:
    """A setting that is changed between calls of new shapes makes another program."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.scale = perceptron(2), 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.body(x) * self.scale).square().mean()

    model, eager = lowtide.rematerialize(make(Scaled), budget="100%"), make(Scaled)
    for iteration, length in enumerate([5, 6, 7, 8, 9, 10]):
        for each in (model, eager):
            each.scale = 1.0 + iteration // 3
            each.zero_grad()
            each(torch.full((length, 32), 0.1)).backward()
        for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad), length


def test_namespaces_of_functions_that_text_defines() -> None:
    """Python's own functions, which ``exec`` puts into them, are as they were after a capture with symbols."""

    names = vars(builtins)
    own = names.copy()
    model, eager = make(Generated), make(Generated)
    try:
        lowtide.rematerialize(model, (torch.full((4, 32), 0.1),), budget="100%", dynamic=True)
    finally:
        after = names.copy()
        names.update(own)
    assert after == own
    for iteration, length in enumerate([5, 6, 7, 8]):
        losses = []
        for each in (model, eager):
            each.names["scale"] = 1.0 + iteration // 2
            losses.append(each(torch.full((length, 32), 0.1)))
        assert torch.equal(*losses), length


def test_programs_are_bounded_and_the_oldest_go(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lowtide")
    model = lowtide.rematerialize(WithLoss(perceptron(3)), budget="100%", max_programs=3)
    for length in (4, 5, 6, 4, 7):
        x = torch.randn(length, 32)
        model(x).backward()
    assert sorted(plan.graph.values[plan.graph.inputs[-1]].shape[0] for plan in lowtide.plans(model)) == [4, 6, 7]


def test_arguments() -> None:
    for options, match in [
        ({"dynamic": "yes"}, "dynamic='yes' is unknown"),
        ({"max_programs": 0}, "max_programs=0 must be an integer of 1 or more"),
    ]:
        with pytest.raises(lowtide.PlanError, match=match):
            lowtide.rematerialize(WithLoss(perceptron(1)), budget="90%", **options)  # type: ignore[arg-type]


def test_static_on_request() -> None:
    model = lowtide.rematerialize(make(_Attention), budget="70%", dynamic=False, planner="greedy")
    for iteration in range(3):
        STEP(model, *copy_inputs(_calls(iteration)))
    assert not _families(model)


class _Boxes(nn.Module):
    """Whose calls are given tensors of several lengths each, as pictures have several objects."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, given: list[torch.Tensor]) -> torch.Tensor:
        losses = [torch.cdist(self.layer(one).tanh(), one).min(0).values.sum() for one in given]
        return sum(losses, torch.zeros(())) / max(1, sum(map(len, given)))


def test_a_call_with_a_length_of_one_leaves_the_others_a_family(caplog: pytest.LogCaptureFixture) -> None:
    plain, planned = plain_and_planned(_Boxes)
    caplog.set_level(logging.INFO, "lowtide")
    for lengths in ((2, 3), (4, 2), (1, 5), (3, 4), (5, 3), (2, 5), (6, 2), (4, 7)):
        given = [torch.randn(length, 8) for length in lengths]
        for model in (plain, planned):
            model.zero_grad()
            model(given).backward()
        assert torch.equal(plain.layer.weight.grad, planned.layer.weight.grad)  # type: ignore[arg-type]
    assert sum("(capture" in message for message in caplog.messages) == 4
