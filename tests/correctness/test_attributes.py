"""What a forward pass leaves in attributes is there, as in eager; counters are noticed, state that is carried along refused."""

from __future__ import annotations

import copy
import cProfile
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lowtide
from lowtide.capture import capture
from tests.support.training import make

WIDTH = 16


class _Noting(nn.Module):
    """Four blocks; ``note(self, block, x, h)`` writes attributes of the model or of a block."""

    def __init__(self, note: Callable[..., Any], **attributes: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.note = note
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x
        for block in self.blocks:
            h = h + block(h)
            extra = self.note(self, block, x, h)
            h = h if extra is None else h + extra
        return h.square().mean()


def _input(iteration: int) -> torch.Tensor:
    return torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(iteration))


Read = Callable[[Any], list[torch.Tensor]]


def _trained(model: nn.Module, read: Read = lambda model: [], weight: float = 0.0) -> list[Any]:
    """Three steps of SGD, also on what ``read`` finds in the model's attributes where ``weight`` is not 0."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    states = []
    for iteration in range(3):
        optimizer.zero_grad()
        loss = model(_input(iteration))
        found = read(model)
        (loss + weight * sum(tensor.square().mean() for tensor in found) if weight else loss).backward()
        states.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
        states.append([(tensor.detach().clone(), tensor.requires_grad) for tensor in found])
        optimizer.step()
    return states


def _assert_trains_as_eager(factory: Callable[[], nn.Module], budget: str, **options: Any) -> None:
    plain, planned = make(factory), make(factory)
    lowtide.rematerialize(planned, (_input(0),), budget=budget, planner="greedy")
    expected, actual = _trained(plain, **options), _trained(planned, **options)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def _auxiliary(model: Any, block: Any, x: torch.Tensor, h: torch.Tensor) -> None:
    block.auxiliary = h.abs().sum()


def _maps(model: Any, block: Any, x: torch.Tensor, h: torch.Tensor) -> None:
    block.map = torch.softmax(h @ h.T, -1).detach()


def _list(model: Any, block: Any, x: torch.Tensor, h: torch.Tensor) -> None:
    model.losses = [h.mean(), {"inner": h.std()}]


def _record(model: Any, block: Any, x: torch.Tensor, h: torch.Tensor) -> None:
    block.record = SimpleNamespace(hidden=h * 2, name="hidden")


def _latest(model: Any, block: Any, x: torch.Tensor, h: torch.Tensor) -> None:
    model.last, model.row = x, h[0]


def _appended(model: Any, block: Any, x: torch.Tensor, h: torch.Tensor) -> None:
    model.losses.append(h.mean())


def _refilled(model: Any, block: Any, x: torch.Tensor, h: torch.Tensor) -> None:
    if block is model.blocks[0]:
        model.losses.clear()
    model.losses.append(h.mean())


def _updated(model: Any, block: Any, x: torch.Tensor, h: torch.Tensor) -> None:
    model.found["first" if block is model.blocks[0] else "last"] = h.mean()


def _emptied(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    found = list(tensors)
    tensors.clear()
    return found


READS: dict[Callable[..., Any], Read] = {
    _auxiliary: lambda model: [block.auxiliary for block in model.blocks],
    _maps: lambda model: [block.map for block in model.blocks],
    _list: lambda model: [model.losses[0], model.losses[1]["inner"]],
    _record: lambda model: [block.record.hidden for block in model.blocks],
    _latest: lambda model: [model.last, model.row],
}


@pytest.mark.parametrize("weight", [0.0, 0.5])
@pytest.mark.parametrize("note", READS, ids=lambda note: note.__name__)
def test_what_every_call_leaves_is_there(note: Callable[..., Any], weight: float) -> None:
    """As eager has it, to the bit, also where the caller trains on it."""
    _assert_trains_as_eager(lambda: _Noting(note), "90%", read=READS[note], weight=weight)


@pytest.mark.parametrize(
    ("note", "attributes", "read", "weight"),
    [
        (_appended, lambda: {"losses": []}, lambda model: _emptied(model.losses), 0.5),
        (_appended, lambda: {"losses": []}, lambda model: list(model.losses), 0.0),
        (_appended, lambda: {"losses": deque(maxlen=6)}, lambda model: list(model.losses), 0.0),
        (_refilled, lambda: {"losses": []}, lambda model: list(model.losses), 0.0),
        (_refilled, lambda: {"losses": deque()}, lambda model: list(model.losses), 0.5),
        (_updated, lambda: {"found": {"other": 1}}, lambda model: [model.found["first"], model.found["last"]], 0.5),
    ],
    ids=["emptied list", "growing list", "deque", "refilled list", "refilled deque", "dictionary"],
)
def test_containers_are_written_in_place(
    note: Callable[..., Any], attributes: Callable[[], dict[str, Any]], read: Read, weight: float
) -> None:
    """By the caller's own reference, too."""
    held: list[Any] = []

    def factory() -> nn.Module:
        given = attributes()
        held.extend(given.values())
        return _Noting(note, **given)

    _assert_trains_as_eager(factory, "100%", read=read, weight=weight)
    assert len(held[-1]) == len(held[-2])


def test_a_profiler_is_running() -> None:
    """Of C, which Python's functions cannot start again once they have stopped it."""
    with cProfile.Profile():
        capture(_Noting(_refilled, losses=[]), (_input(0),))


def test_other_shapes_after_attributes_were_assigned() -> None:
    model = make(lambda: _Noting(_list))
    lowtide.rematerialize(model, budget="100%", planner="keep-all")
    for rows in (8, 5, 8):
        model(torch.randn(rows, WIDTH)).backward()
        assert model.losses[1]["inner"].requires_grad
    assert len(lowtide.plans(model)) == 2


def test_what_is_left_is_released_with_the_next_call() -> None:
    model = make(lambda: _Noting(_maps))
    lowtide.rematerialize(model, budget="100%", planner="keep-all")
    for _ in range(2):
        model(_input(0)).backward()
    levels = [lowtide.measure(lambda: model(_input(0)).backward()).final_bytes for _ in range(3)]
    assert levels == [0, 0, 0]


def _cached(model: Any, block: Any, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    if model.mask is None:
        model.mask = torch.ones(WIDTH, WIDTH).tril()
    return h @ model.mask


def _counted(model: Any, block: Any, x: torch.Tensor, h: torch.Tensor) -> None:
    model.calls += "one"


def test_a_counter_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="lowtide"):
        capture(_Noting(_counted, calls=""), (_input(0),))
    assert "changes plain attributes (calls) in every call" in caplog.text


def _flag(model: Any, block: Any, x: torch.Tensor, h: torch.Tensor) -> None:
    model.ready = True


def test_a_flag_is_not(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="lowtide"):
        capture(_Noting(_flag, ready=False), (_input(0),))
    assert not caplog.text


def _annealed(model: Any, block: Any, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    model.calls += 1
    return h * float(f"{1 / model.calls:.3f}")


def _switched(model: Any, block: Any, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor | None:
    first, model.warm = not model.warm, True
    return h.sin() if first else None


def _of_the_first_input(model: Any, block: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    if model.hidden is None:
        model.hidden = x.detach().mean(0)
    return model.hidden


def _first_input(model: Any, block: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    if model.hidden is None:
        model.hidden = x
    return model.hidden


def _noise(model: Any, block: Any, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    if model.hidden is None:
        model.hidden = torch.randn(WIDTH)
    return h * model.hidden


def _growing(model: Any, block: Any, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    model.seen = [*model.seen, h.mean().detach()]
    return torch.stack(model.seen).sum()


def _replaced(model: Any, block: Any, x: torch.Tensor, h: torch.Tensor) -> None:
    if not hasattr(model, "late"):
        model.late = nn.Identity()


REFUSED: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (_annealed, {"calls": 0}, "depends on attributes"),
    (_growing, {"seen": ()}, "leaves other shapes in plain attributes"),
    (_replaced, {}, "replaces submodules"),
]


@pytest.mark.parametrize(("note", "attributes", "message"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_state_in_attributes_is_refused(note: Callable[..., Any], attributes: dict[str, Any], message: str) -> None:
    model = _Noting(note, **attributes)
    with pytest.raises(lowtide.CaptureError, match=message):
        capture(model, (_input(0),))
    assert all(vars(model)[name] is value for name, value in attributes.items())


def test_what_the_first_call_prepares() -> None:
    """As the error says: call the model once before."""

    def called() -> nn.Module:
        model = _Noting(_replaced)
        with torch.no_grad():
            model(_input(7))
        return model

    _assert_trains_as_eager(called, "100%")


def _longest(model: Any, block: Any, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    model.longest = max(model.longest, len(x))
    return h / model.longest


def _some_shapes(model: Any, block: Any, x: torch.Tensor, h: torch.Tensor) -> None:
    block.auxiliary = h.mean() if len(x) > 8 else None


def _table(model: Any, block: Any, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    if model.table is None or len(model.table) < len(x):
        model.table = torch.arange(len(x)) / len(x)
    rows: torch.Tensor = model.table[: len(x), None]
    return rows


def _fields(model: Any, block: Any, x: torch.Tensor, h: torch.Tensor) -> None:
    model.box.loss, model.box.inner.rows = h.abs().sum(), len(x)


def _slots(model: Any, block: Any, x: torch.Tensor, h: torch.Tensor) -> None:
    model.box.loss = h.abs().sum()


def _said_once(model: Any, block: Any, x: torch.Tensor, h: torch.Tensor) -> None:
    model.said["short"] = True


def _lengths(model: Any, block: Any, x: torch.Tensor, h: torch.Tensor) -> None:
    model.lengths.add(len(x))


def _deleted(model: Any, block: Any, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor | None:
    if "first" not in vars(model):
        return None
    del model.first
    return h.sin()


def _busy(model: Any, block: Any, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor | None:
    model.busy = True
    result = h.sin() if model.busy else None
    model.busy = False
    return result


def _shifted(model: Any, block: Any, x: torch.Tensor, h: torch.Tensor) -> None:
    """Settles in the third call."""
    if block is model.blocks[0]:
        model.earlier, model.rows = model.rows, len(x)


def _flagged_later(model: Any, block: Any, x: torch.Tensor, h: torch.Tensor) -> None:
    if block is model.blocks[0]:
        model.hot, model.warm = model.warm, True


def _nested(model: Any, block: Any, x: torch.Tensor, h: torch.Tensor) -> None:
    model.found["inner"]["mean"] = h.mean()


def _meters(model: Any, block: Any, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    """Objects in a dictionary, as metrics are kept."""
    before: torch.Tensor = model.meters["mean"].loss
    model.meters["mean"].loss = h.mean(0).detach()
    return before


class _Slotted:
    __slots__ = ("loss",)


LEFT: dict[Callable[..., Any], tuple[Callable[[], dict[str, Any]], Callable[[Any], Any]]] = {
    _cached: (lambda: {"mask": None}, lambda model: model.mask),
    _switched: (lambda: {"warm": False}, lambda model: model.warm),
    _of_the_first_input: (lambda: {"hidden": None}, lambda model: model.hidden),
    _noise: (lambda: {"hidden": None}, lambda model: model.hidden),
    _longest: (lambda: {"longest": 0}, lambda model: model.longest),
    _some_shapes: (dict, lambda model: [block.auxiliary for block in model.blocks]),
    _table: (lambda: {"table": None}, lambda model: model.table),
    _fields: (
        lambda: {"box": SimpleNamespace(loss=None, inner=SimpleNamespace(rows=0))},
        lambda model: [model.box.loss, model.box.inner.rows],
    ),
    _slots: (lambda: {"box": _Slotted()}, lambda model: model.box.loss),
    _said_once: (lambda: {"said": {}}, lambda model: model.said),
    _lengths: (lambda: {"lengths": set()}, lambda model: model.lengths),
    _deleted: (lambda: {"first": True}, lambda model: "first" in vars(model)),
    _busy: (dict, lambda model: model.busy),
    _shifted: (lambda: {"earlier": 0, "rows": 0}, lambda model: (model.earlier, model.rows)),
    _flagged_later: (lambda: {"hot": False, "warm": False}, lambda model: (model.hot, model.warm)),
    _nested: (lambda: {"found": {"inner": {}}}, lambda model: model.found["inner"]["mean"]),
    _meters: (
        lambda: {"meters": {"mean": SimpleNamespace(loss=torch.zeros(WIDTH))}},
        lambda model: model.meters["mean"].loss,
    ),
}


@pytest.mark.parametrize("note", LEFT, ids=lambda note: note.__name__)
def test_what_calls_leave_for_calls_of_other_shapes(note: Callable[..., Any]) -> None:
    """As eager has it, after every call, in the very containers and objects that were there."""
    attributes, read = LEFT[note]

    def factory() -> nn.Module:
        model = _Noting(note, **attributes())
        del model.blocks[2:]  # which are captured for each of the shapes
        return model

    plain, planned = make(factory), make(factory)
    given = {name: value for name, value in vars(planned).items() if name in attributes() and value is not None}
    lowtide.rematerialize(planned, (torch.randn(16, WIDTH),), budget="100%", planner="keep-all")
    for number, rows in enumerate((16, 16, 40, 8, 40, 16, 8)):
        x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(number))
        found = []
        for model in (plain, planned):
            torch.manual_seed(number)
            model.zero_grad()
            loss = model(x)
            left = read(model)
            tensors = [t for t in (left if isinstance(left, list) else [left]) if isinstance(t, torch.Tensor)]
            sum((t.square().sum() for t in tensors if t.requires_grad), loss).backward()
            found.append((loss.detach(), [p.grad for p in model.parameters()], [t.detach() for t in tensors], left))
        torch.testing.assert_close(found[1][:3], found[0][:3], rtol=0, atol=0)
        if not found[0][2]:
            assert found[1][3] == found[0][3]
    mutable = [name for name, value in given.items() if not isinstance(value, (bool, int))]
    assert all(vars(planned)[name] is given[name] for name in mutable)


@pytest.mark.parametrize("note", [_said_once, _busy], ids=lambda note: note.__name__)
def test_what_changes_no_program_is_captured_once(note: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    model = make(lambda: _Noting(note, **LEFT[note][0]()))
    with caplog.at_level(logging.INFO, logger="lowtide"):
        lowtide.rematerialize(model, (_input(0),), budget="100%", planner="keep-all")
        for _ in range(3):
            model(_input(0)).backward()
    assert "captured again" not in caplog.text
    assert len(lowtide.plans(model)) == 1


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * ctx.scale, None


def _by_a_function(h: torch.Tensor, scale: float) -> torch.Tensor:
    return _Scaled.apply(h, scale)  # type: ignore[no-untyped-call, no-any-return]


def _by_a_hook(h: torch.Tensor, scale: float) -> torch.Tensor:
    h = h.clone()
    h.register_hook(lambda gradient: gradient * scale)
    return h


def _by_a_hook_of_a_node(h: torch.Tensor, scale: float) -> torch.Tensor:
    h = h.clone()
    assert h.grad_fn is not None
    h.grad_fn.register_prehook(lambda gradients: (gradients[0] * scale,))
    return h


@pytest.mark.parametrize("scaled", [_by_a_function, _by_a_hook, _by_a_hook_of_a_node])
def test_what_the_first_call_sets_for_backward_passes(scaled: Callable[..., torch.Tensor]) -> None:
    """The second call runs the same operators forward, and others back."""

    class Warming(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
            self.scale = 0.5

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = scaled(self.layers(x), self.scale)
            self.scale = 2.0
            return h.square().mean()

    _assert_trains_as_eager(Warming, "100%")


def test_one_list_in_several_modules() -> None:
    """Is added to once, as in eager, also where a plan is made for other gradients."""

    def note(model: Any, block: Any, x: torch.Tensor, h: torch.Tensor) -> None:
        block.losses.append(h.mean())

    plain, planned = (make(lambda: _Noting(note, losses=[])) for _ in range(2))
    for model in (plain, planned):
        for block in model.blocks:
            block.losses = model.losses
    lowtide.rematerialize(planned, (_input(0),), budget="100%", planner="keep-all")
    for iteration in range(3):
        for model in (plain, planned):
            model.losses.clear()
            model.zero_grad()
            (model(_input(iteration)) + torch.stack(model.losses).sum()).backward()
        assert len(planned.losses) == len(plain.losses) == 4
        for expected, found in zip(plain.parameters(), planned.parameters(), strict=True):
            assert torch.equal(expected.grad, found.grad)


class _Installing(nn.Module):
    """Puts hooks into its layers in its first call, as models of ``transformers`` that return what is inside do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.installed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.installed:
            self.installed = True
            self.layer.register_forward_hook(lambda module, args, output: output * 2)
        return self.layer(x).square().mean()


def test_hooks_that_the_first_call_installs() -> None:
    """What says that they are there is not left behind without them."""
    plain, planned = (make(_Installing) for _ in range(2))
    lowtide.rematerialize(planned, (_input(0),), budget="100%", planner="keep-all")
    for iteration in range(3):
        found = []
        for model in (plain, planned):
            model.train().zero_grad()
            model(_input(iteration)).backward()
            found.append([model.eval()(_input(iteration)).detach(), *(p.grad for p in model.parameters())])
        assert all(map(torch.equal, *found))


def test_detached_results_are() -> None:
    """Also where they are otherwise the very tensor of another result, of a parameter, or of an argument."""

    class Detaching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> Any:
            h = torch.tanh(self.layer(x))
            self.target = h.detach()
            return h, h.detach(), self.layer.weight.detach(), x.detach()

    found = []
    plain, planned = (make(Detaching) for _ in range(2))
    lowtide.rematerialize(planned, budget="100%", planner="keep-all")
    for model in (plain, planned):
        x = _input(0).requires_grad_()
        results = model(x)
        assert [t.requires_grad for t in (*results, model.target)] == [True, False, False, False, False]
        (results[0] * model.target + results[0] * results[1]).mean().backward()
        found.append([x.grad, *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *found))


def test_other_gradients_of_the_first_call() -> None:
    """The model is captured again as that call found it."""

    class _Two(_Noting):
        def forward(self, x: torch.Tensor) -> Any:
            loss = super().forward(x)
            return loss, torch.stack([loss, x.mean()])

    plain, planned = (make(lambda: _Two(_switched, warm=False)) for _ in range(2))
    lowtide.rematerialize(planned, (_input(0),), budget="100%", planner="keep-all")
    for iteration in range(2):
        for model in (plain, planned):
            model.zero_grad()
            model(_input(iteration))[1].sum().backward()
        assert planned.warm is True
        for expected, found in zip(plain.parameters(), planned.parameters(), strict=True):
            assert torch.equal(expected.grad, found.grad)


def test_arrays_that_are_written_are_said(caplog: pytest.LogCaptureFixture) -> None:
    def note(model: Any, block: Any, x: torch.Tensor, h: torch.Tensor) -> None:
        model.histogram[0] = 1

    with caplog.at_level(logging.WARNING, logger="lowtide"):
        capture(_Noting(note, histogram=np.zeros(3)), (_input(0),))
    assert "writes objects or arrays in plain attributes (histogram)" in caplog.text


@dataclass
class _Strict:
    """A configuration that refuses to answer for a field, as heterogeneous models of ``transformers`` have."""

    width: int = WIDTH
    heads: int = 4

    def __getattribute__(self, name: str) -> Any:
        if name == "heads":
            raise RuntimeError("heads differ from layer to layer")
        return super().__getattribute__(name)


class _Uncounted(list):  # type: ignore[type-arg]
    """Refuses to tell how long it is, and what is in it, as the representations of ``e3nn`` do."""

    def __len__(self) -> int:
        raise NotImplementedError

    def __contains__(self, item: object) -> bool:
        raise NotImplementedError


class _UncountedTuple(tuple):  # type: ignore[type-arg]
    __len__, __contains__ = _Uncounted.__len__, _Uncounted.__contains__


@pytest.mark.parametrize(
    "config", [_Strict(), _Uncounted([[WIDTH]]), _UncountedTuple([[WIDTH]])], ids=["object", "list", "tuple"]
)
def test_configurations_may_refuse_to_answer(config: Any) -> None:
    def note(model: Any, block: nn.Module, x: torch.Tensor, h: torch.Tensor) -> None:
        assert (model.config.width if hasattr(model.config, "width") else next(iter(model.config))[0]) == WIDTH

    plain, planned = (make(lambda: _Noting(note, config=config)) for _ in range(2))
    lowtide.rematerialize(planned, (_input(0),), budget="70%", planner="greedy", on_capture_error="error")
    for expected, found in zip(_trained(plain), _trained(planned), strict=True):
        assert all(map(torch.equal, expected, found))


CHOSEN = {
    "parameter": lambda m, h, number: h * m.choices[number],
    "intermediate": lambda m, h, number: [h.detach().sin(), h.detach().cos()][number // 2],
    "left": lambda m, h, number: m.extra.__setitem__("extra", m.choices[number] * 2),
}


def _choosing(case: str, number: Callable[[int], int]) -> nn.Module:
    def note(m: Any, block: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
        made = CHOSEN[case](m, h, number(m.count))
        m.count += 1 if block is m.blocks[-1] else 0
        return made

    choices = nn.ParameterList(torch.full((WIDTH,), float(i)) for i in range(4))
    return make(lambda: _Noting(note, count=0, extra={}, choices=choices))


@pytest.mark.parametrize("case", CHOSEN)
def test_counters_that_choose_among_tensors_of_one_shape_are_noticed(case: str) -> None:
    """The same operators run in each call, on others: planned calls would go on with those of the first."""
    with pytest.raises(
        lowtide.CaptureError, match=r"depends on attributes that its own forward pass changes \(count\)"
    ):
        capture(_choosing(case, lambda count: count % 40 // 10), (_input(0),))


@pytest.mark.parametrize("case", CHOSEN)
def test_counters_that_choose_in_turn(case: str) -> None:
    plain, planned = (_choosing(case, lambda count: count % 4) for _ in range(2))
    lowtide.rematerialize(planned, (_input(0),), budget="100%", planner="greedy")
    for expected, found in zip(_trained(plain), _trained(planned), strict=True):
        assert all(map(torch.equal, expected, found))


class _WithTable(nn.Module):
    """Reads a table that is neither a parameter nor a buffer."""

    def __init__(self, table: torch.Tensor, read: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 32)
        self.table, self.read = table, read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angles = self.read(self.table)
        y = torch.tanh(self.first(x))
        y = y * angles.cos() + y.flip(-1) * angles.sin()
        return self.last(y).square().mean()


@pytest.mark.parametrize(
    "read",
    [
        lambda table: table[:64],
        lambda table: table.view(2, 32, 32).view(64, 32),
        lambda table: table.unsqueeze(0),
        lambda table: table.detach()[:64],
        lambda table: table.split(64)[0].t().t(),
        lambda table: table.view(torch.int32).view(torch.float32),
    ],
    ids=["slice", "view", "unsqueeze", "detached", "split", "type"],
)
def test_nothing_is_written_over_a_table_that_is_held(read: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A view of it is no memory of the program's."""
    plain = _WithTable(torch.rand(64, 32), read)
    model, before = copy.deepcopy(plain), plain.table.clone()
    x = torch.rand(64, 64, 32)
    lowtide.rematerialize(model, (x,), budget="85%")
    for _ in range(3):
        losses = [each(x) for each in (plain, model)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
        assert torch.equal(model.table, before)
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]
