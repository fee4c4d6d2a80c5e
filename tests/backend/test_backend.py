"""``torch.compile(model, backend="lowtide")``: Dynamo's graphs under one budget."""

from __future__ import annotations

import copy
import gc
import logging
import tomllib
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.backend import backend
from lowtide.backend.compile import _BUDGETS, SharingGraph, shared_budget
from lowtide.fusion import Kernel
from tests.support.training import QUICK

# Dynamo looks at .grad of what one graph hands to the next.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")

PLANNER = QUICK
ROWS, WIDTH = 256, 32


class _Blocks(nn.Module):
    """Six residual blocks, in one graph, or in three with ``breaks``."""

    def __init__(self, breaks: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.breaks = breaks
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Dropout(dropout), nn.Linear(64, WIDTH)) for _ in range(6)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c, d, e, f = self.blocks
        x = x + a(x)
        x = x + b(x)
        if self.breaks:
            torch._dynamo.graph_break()
        x = x + c(x)
        x = x + d(x)
        if self.breaks:
            torch._dynamo.graph_break()
        x = x + e(x)
        return (x + f(x)).square().mean()


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _pair(**options: Any) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    plain = _Blocks(**options)
    return plain, copy.deepcopy(plain), torch.randn(ROWS, WIDTH)


def _step(model: Any, x: torch.Tensor, seed: int = 0) -> None:
    for parameter in model.parameters():
        parameter.grad = None
    torch.manual_seed(seed)
    model(x).backward()


def _peak(model: Any, x: torch.Tensor) -> int:
    model.zero_grad()
    return lowtide.measure(_step, model, x).peak_bytes


def _budget(plain: nn.Module, x: torch.Tensor, share: float) -> int:
    return int(share * _peak(plain, x))


def _assert_same_gradients(plain: nn.Module, compiled: nn.Module) -> None:
    for one, other in zip(plain.parameters(), compiled.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.equal(one.grad, other.grad)


def _train_alike(plain: nn.Module, model: nn.Module, compiled: Any, x: torch.Tensor, steps: int = 3) -> None:
    for seed in range(steps):
        _step(plain, x, seed)
        _step(compiled, x, seed)
        _assert_same_gradients(plain, model)


def _compile(model: nn.Module, budget: int | str, compiler: str = "eager") -> Any:
    return torch.compile(model, backend=backend, options={"budget": budget, "planner": PLANNER, "compiler": compiler})


def test_one_graph() -> None:
    plain, model, x = _pair(dropout=0.2)
    budget = _budget(plain, x, 0.5)
    compiled = _compile(model, budget)
    _train_alike(plain, model, compiled, x)
    assert _peak(compiled, x) <= budget


@pytest.mark.parametrize("breaks", [False, True])
def test_graphs_move_tensors(breaks: bool, tmp_path: Path) -> None:
    """To a file and back, within one budget."""
    plain, model, x = _pair(dropout=0.2, breaks=breaks)
    options = {"budget": _budget(plain, x, 0.5), "planner": "offload{effort=0}", "compiler": "eager"}
    compiled = torch.compile(model, backend=backend, options={**options, "offload": f"disk:{tmp_path}"})
    _train_alike(plain, model, compiled, x)
    assert _peak(compiled, x) <= options["budget"]
    schedules = [one.entry.plan.schedule for budget in _BUDGETS for one in budget.record.passes]
    assert any(schedule.moves for schedule in schedules)


def test_gradients_of_another_layout_than_expected(caplog: pytest.LogCaptureFixture) -> None:
    """A sum hands back an expanded gradient: the graph is planned again in its own place, not beside itself."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)))
    model, x = copy.deepcopy(plain), torch.randn(ROWS, WIDTH)

    def step(model: Any, seed: int) -> None:
        torch.manual_seed(seed)
        model.zero_grad()
        model(x).sum().backward()

    compiled = _compile(model, "60%")
    for seed in range(3):
        step(plain, seed)
        step(compiled, seed)
        _assert_same_gradients(plain, model)
    assert "may exceed the budget" not in caplog.text


@pytest.mark.parametrize("share", [0.35, 0.7])
def test_graphs_share_the_budget(share: float) -> None:
    """The first step shows how many graphs there are; from the second on the budget holds for all of them."""
    plain, model, x = _pair(breaks=True)
    budget = _budget(plain, x, share)
    compiled = _compile(model, budget)
    _train_alike(plain, model, compiled, x)
    assert budget / 2 < _peak(compiled, x) <= budget


class _SmallFirst(nn.Module):
    """The first graph cannot do with less than it takes, the second can."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest = nn.Linear(WIDTH, WIDTH), _Blocks()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.rest(x)


def test_a_percentage_is_of_all_graphs(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    plain = _SmallFirst()
    model, x = copy.deepcopy(plain), torch.randn(ROWS, WIDTH)
    compiled = _compile(model, "60%")
    _train_alike(plain, model, compiled, x)
    assert "of the step needs" not in caplog.text  # the first graph alone could not meet 60 % of its own peak
    assert _peak(compiled, x) <= _budget(plain, x, 0.6)


def test_a_first_step_that_is_broken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    plain = _SmallFirst()
    model, x = copy.deepcopy(plain), torch.randn(ROWS, WIDTH)
    compiled = _compile(model, "60%")

    def refuse(*args: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(SharingGraph, "run", refuse)
        with pytest.raises(KeyboardInterrupt):
            _step(compiled, x)
    _train_alike(plain, model, compiled, x)


def test_a_percentage_that_a_single_graph_cannot_meet() -> None:
    _, model, x = _pair()
    with pytest.raises(lowtide.InfeasibleBudgetError, match="the smallest budget it can meet"):
        _step(_compile(model, "5%"), x)


def test_budget_too_small_for_the_graphs_together() -> None:
    plain, model, x = _pair(breaks=True)
    compiled = _compile(model, _budget(plain, x, 0.25))
    _step(compiled, x)
    with pytest.raises(lowtide.InfeasibleBudgetError, match="3 graphs of the step need") as caught:
        _step(compiled, x)
    torch._dynamo.reset()
    budget = caught.value.minimum_bytes
    compiled = _compile(model, budget)
    for _ in range(2):
        _step(compiled, x)
    assert _peak(compiled, x) <= budget


class _Keeping(torch.autograd.Function):
    """Keeps about as much for its backward pass as a graph does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x.new_ones(12, *x.shape))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.saved_tensors[0][0]


_kept = torch._dynamo.disable(_Keeping.apply)


class _KeptBetween(nn.Module):
    """Code that Dynamo is told to leave alone, between two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _Blocks(), _Blocks()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(_kept(x + self.first(x)))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by Dynamo
def test_what_code_between_the_graphs_holds_counts() -> None:
    torch.manual_seed(0)
    plain, x = _KeptBetween(), torch.randn(ROWS, WIDTH)
    model = copy.deepcopy(plain)
    budget = _budget(plain, x, 0.7)
    compiled = _compile(model, budget)
    _train_alike(plain, model, compiled, x, steps=4)
    assert budget / 2 < _peak(compiled, x) <= budget


class _Repeated(nn.Module):
    """One layer five times, with breaks between: its parameters' gradients are there once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x).sin()
        torch._dynamo.graph_break()
        x = self.layer(x).sin()
        torch._dynamo.graph_break()
        x = self.layer(x).sin()
        torch._dynamo.graph_break()
        x = self.layer(x).sin()
        torch._dynamo.graph_break()
        return self.layer(x).square().mean()


def test_gradients_of_what_several_graphs_read_count_once() -> None:
    torch.manual_seed(0)
    plain, x = _Repeated(), torch.randn(8, 256)
    model = copy.deepcopy(plain)
    budget = _budget(plain, x, 1.1)  # too small for five gradients
    options = {"budget": budget, "planner": PLANNER, "compiler": "eager"}
    compiled = torch.compile(model, backend=backend, options=options)
    _train_alike(plain, model, compiled, x)
    assert len(shared_budget(options).ran) == 5
    assert _peak(compiled, x) <= budget


def test_shapes_that_alternate_keep_their_plans(caplog: pytest.LogCaptureFixture) -> None:
    plain, model, x = _pair(breaks=True)
    compiled = torch.compile(
        model, dynamic=False, backend=backend, options={"budget": "45%", "planner": PLANNER, "compiler": "eager"}
    )
    with caplog.at_level(logging.INFO, logger="lowtide"):
        for turn in range(6):
            if turn == 4:
                caplog.clear()
            rows = x[: ROWS // (1 + turn % 2)]
            _train_alike(plain, model, compiled, rows, steps=1)
    assert "planned" not in caplog.text


def test_a_second_start_takes_plans_from_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("LOWTIDE_PLAN_CACHE", "1")
    found = []
    for _ in range(2):
        torch._dynamo.reset()
        plain, model, x = _pair()
        options = {"budget": _budget(plain, x, 0.5), "planner": PLANNER, "compiler": "eager"}
        _step(torch.compile(model, backend=backend, options=options), x)
        found.append([one.entry.plan.cached for one in shared_budget(options).ran])
    assert found == [[False], [True]]


@pytest.mark.parametrize(
    "rows",
    [pytest.param(ROWS, id="same shape"), pytest.param(ROWS // 2, id="two shapes", marks=pytest.mark.slow)],
)
def test_a_graph_that_runs_twice_before_the_backward_pass(rows: int, caplog: pytest.LogCaptureFixture) -> None:
    """The views of a siamese network: what the first call saved is there while the second one runs."""

    def step(model: Any, x: torch.Tensor) -> None:
        for parameter in model.parameters():
            parameter.grad = None
        torch.manual_seed(0)
        (model(x) - model(other)).square().backward()

    plain, model, x = _pair(dropout=0.1)
    other = x[:rows] + 1
    step(plain, x)
    for parameter in plain.parameters():
        parameter.grad = None
    budget = int(0.7 * lowtide.measure(step, plain, x).peak_bytes)
    compiled = _compile(model, budget)
    for _ in range(3):  # Dynamo makes a graph for changing shapes when it meets the second one
        step(compiled, x)
    assert "all are replanned" in caplog.text
    for parameter in model.parameters():
        parameter.grad = None
    for _ in range(2):
        assert lowtide.measure(step, compiled, x).peak_bytes <= budget
        _assert_same_gradients(plain, model)
        for parameter in model.parameters():
            parameter.grad = None


def test_a_pass_that_always_waits_for_its_backward_pass() -> None:
    """A loss that is kept until the next step (a validation without ``no_grad``) does not keep the steps before it."""
    plain, model, x = _pair()
    options = {"budget": "100%", "planner": PLANNER, "compiler": "eager"}
    compiled = torch.compile(model, backend=backend, options=options)
    sizes = []
    for _ in range(6):
        kept = compiled(x[: ROWS // 2])
        compiled(x).backward()
        shared = shared_budget(options)
        sizes.append((len(shared.ran), len(shared._known)))
    assert kept.requires_grad
    assert len(set(sizes[3:])) == 1
    assert sizes[-1][0] == 2
    for _ in range(6):
        plain(x).backward()
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, its.grad)  # type: ignore[arg-type]


def test_options_that_are_changed_belong_to_another_budget() -> None:
    options: dict[str, Any] = {"planner": PLANNER, "compiler": "eager"}
    for share in (1.0, 0.5):
        torch._dynamo.reset()  # it knows the code by options that are equal now
        plain, model, x = _pair()
        options["budget"] = _budget(plain, x, share)
        compiled = torch.compile(model, backend=backend, options=options)
        _step(compiled, x)
        peaks = [_peak(compiled, x) for _ in range(3)]
        assert max(peaks) <= options["budget"]
        assert share < 1 or len({*peaks}) == 1  # the first calls take no copies of parameters


def test_a_graph_without_gradients_runs_as_it_is() -> None:
    """A teacher before a break."""

    class Distilled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.teacher, self.student = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                target = self.teacher(x)
            torch._dynamo.graph_break()
            return (self.student(x) - target).square().mean()

    plain, x = Distilled(), torch.randn(4, 8)
    model = copy.deepcopy(plain)
    compiled = _compile(model, "100%")
    for _ in range(2):
        assert torch.equal(compiled(x), plain(x))
    for each in (compiled, plain):
        each(x).backward()
    assert torch.equal(model.student.weight.grad, plain.student.weight.grad)


class _Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.clamp(-1e-4, 1e-4)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by Dynamo
def test_an_autograd_function_at_the_end_of_a_graph() -> None:
    plain, x = nn.Linear(8, 8), torch.randn(4, 8)
    model = copy.deepcopy(plain)
    compiled = torch.compile(
        lambda x: (_Clipped.apply(model(x)), model(x).sum()),
        backend=backend,
        options={"budget": "100%", "planner": PLANNER, "compiler": "eager"},
    )
    for one, other in (compiled(x), (_Clipped.apply(plain(x)), plain(x).sum())):
        (one.square().mean() + other).backward()
    assert torch.equal(model.weight.grad, plain.weight.grad)


def test_other_shapes_are_planned() -> None:
    plain, model, x = _pair()
    compiled = _compile(model, "60%")
    for rows in (ROWS, 100, 64):
        _train_alike(plain, model, compiled, x[:rows], steps=1)


def test_without_gradients() -> None:
    plain, model, x = _pair()
    compiled = _compile(model, "60%")
    with torch.no_grad():
        assert torch.equal(compiled(x), plain(x))


def test_inductor_is_the_default_compiler() -> None:
    torch.manual_seed(0)
    plain, x = nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Tanh(), nn.Linear(8, 1)), torch.randn(ROWS, WIDTH)
    model = copy.deepcopy(plain)
    options = {"budget": "100%", "planner": "keep-all"}
    compiled = torch.compile(model, backend=backend, options=options)
    for each in (plain, compiled):
        each(x).square().mean().backward()
    (graph,) = shared_budget(options).ran
    assert any(isinstance(call.target, Kernel) for call in graph.entry.program.calls)
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-4, atol=1e-7)


def test_known_by_name() -> None:
    from lowtide.backend import register

    register()
    assert "lowtide" in torch._dynamo.list_backends()
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["torch_dynamo_backends"] == {"lowtide": "lowtide.backend:backend"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budgets": 1}, "no option 'budgets'"),
        ({"total_budget": "1GiB"}, "total_budget= is for lowtide.rematerialize"),
        ({}, "give either budget="),
        ({"budget": "1GiB", "seed": "0"}, "seed is '0', but must be an integer"),
        ({"budget": "1GiB", "planner": "automatic"}, "no planner is named 'automatic'"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(lowtide.PlanError, match=message):
        backend(torch.fx.symbolic_trace(nn.Linear(2, 2)), [], options=options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": "1MiB", "reserve": "2MiB"}, "2097152 bytes are reserved.* leaves nothing of the budget"),
        ({"budget": "4000TiB"}, "more than the device cpu has"),
    ],
)
def test_budgets_that_cannot_be(options: dict[str, Any], message: str) -> None:
    _, model, x = _pair()
    compiled = torch.compile(model, backend=backend, options={"planner": PLANNER, "compiler": "eager", **options})
    with pytest.raises(lowtide.PlanError, match=message):
        compiled(x)


@pytest.mark.parametrize("breaks", [False, True])
def test_what_is_compiled_no_more_is_freed(breaks: bool) -> None:
    """The budget that graphs share belongs to them: it keeps no model, and is gone with the last graph (of the graphs behind a
    break Dynamo itself keeps some)."""
    _, model, x = _pair(breaks=breaks)
    options = {"budget": "100%", "planner": PLANNER, "compiler": "eager"}
    compiled = torch.compile(model, backend=backend, options=options)
    for seed in range(2):
        _step(compiled, x, seed)
    budget = shared_budget(options)
    assert len(budget.ran) == (3 if breaks else 1)
    held = [weakref.ref(each) for each in (model, *model.parameters())]
    if not breaks:
        held += [weakref.ref(budget), weakref.ref(budget.ran[0].graph)]
    del model, compiled, budget
    torch._dynamo.reset()
    gc.collect()
    assert not [reference() for reference in held if reference() is not None]
    assert breaks or not any(known.belongs_to(options) for known in _BUDGETS)
