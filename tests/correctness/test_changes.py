"""What a program depends on that no argument shows, changed after the plan was made: the next call follows, as in eager."""

from __future__ import annotations

import abc
import copy
import logging
import random
import sys
import threading
from collections.abc import Callable
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from tests.support.beside import assert_as_eager


class _Slotted:
    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 1.0

    def times(self, x: float) -> float:
        return self.number * x


class _Model(nn.Module):
    """Depends on about everything that a module can hold."""

    beta = 1.0
    table_of_class = (1.0,)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.alpha = 0.1
        self.activation: Callable[[torch.Tensor], torch.Tensor] = torch.tanh
        self.dropout = nn.Dropout(0.0)
        self.config = SimpleNamespace(scale=2.0, shifts=[0.5], inner=SimpleNamespace(power=2))
        self.table = {"a": [1.0, 2.0]}
        self.offset = torch.zeros(8)
        self.not_a_number = float("nan")
        self.array = np.ones(8, dtype=np.float32)
        self.slotted = _Slotted()
        self.type = "mean"  # a name of nn.Module's own
        self.times = [1, 2]
        self.threshold = torch.tensor(0.5)
        self.of_config = self.config.inner.__class__
        self.method = self.slotted.times
        self.calls = 0  # by the training loop, and never read

    @property
    def shift(self) -> float:
        return float(sum(self.config.shifts) + self.table["a"][1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.dropout(self.activation(self.linear(x)) * self.alpha * self.beta + self.shift + self.offset)
        if self.not_a_number > 0 or self.threshold > 1:
            y = y * 3
        y = (y * self.config.scale * torch.from_numpy(self.array)).pow(self.config.inner.power) * self.table_of_class[0]
        y = y + self.slotted.number * self.method(2.0) + torch.arange(8) * self.times[0]
        return y.mean() if self.type == "mean" else y.sum()


def _anneal(model: Any) -> None:
    model.alpha = 0.2


def _type_alone(model: Any) -> None:
    model.alpha, model.dropout = 1, nn.Dropout(0)


def _drop(model: Any) -> None:
    model.dropout.p = 0.5


def _exchange(model: Any) -> None:
    model.activation = F.relu


def _replace(model: Any) -> None:
    model.dropout = nn.Tanh()


def _hook(model: Any) -> None:
    model.linear.register_forward_hook(lambda module, args, result: result * 2)


def _shadow(model: Any) -> None:
    model.beta = 0.5


def _configure(model: Any) -> None:
    model.config.scale = 3.0


def _configure_deeper(model: Any) -> None:
    model.config.shifts[0] = 1.5


def _write_into(model: Any) -> None:
    model.table["a"][1] = 4.0


def _grow(model: Any) -> None:
    model.config.shifts.append(1.0)


def _other_tensor(model: Any) -> None:
    model.offset = torch.ones(8)


def _patch(model: Any) -> None:
    model.linear.forward = MethodType(lambda self, x: F.linear(x, self.weight), model.linear)


def _number(model: Any) -> None:
    model.not_a_number = 1.0


def _write_array(model: Any) -> None:
    model.array[3] = 2


def _slot(model: Any) -> None:
    model.slotted.number = 3.0


def _sum(model: Any) -> None:
    model.type = "sum"


def _nested(model: Any) -> None:
    model.config.inner.power = 4


def _floats(model: Any) -> None:
    model.times[:] = [1.0, 2.0]


def _fill(model: Any) -> None:
    model.threshold.fill_(2.0)


_CHANGES = [
    (_write_array, "_Model.array is another ndarray"),
    (_slot, "_Model.method.number is 3.0"),
    (_sum, "_Model.type is 'sum'"),
    (_nested, "_Model.config.inner.power is 4"),
    (_floats, "_Model.times[0] is 1.0"),
    (_fill, "False, then True"),
    (_anneal, "_Model.alpha is 0.2"),
    (_type_alone, "_Model.alpha is 1"),
    (_drop, "dropout.p is 0.5"),
    (_exchange, "_Model.activation is another"),
    (_replace, "dropout is a Tanh"),
    (_hook, "linear has other hooks"),
    (_shadow, "_Model.beta is 0.5"),
    (_configure, "_Model.config.scale is 3.0"),
    (_configure_deeper, "_Model.config.shifts[0] is 1.5"),
    (_write_into, "_Model.table['a'][1] is 4.0"),
    (_grow, "_Model.config.shifts is another list"),
    (_other_tensor, "_Model.offset is another Tensor"),
    (_patch, "linear.forward is another method"),
    (_number, "_Model.not_a_number is 1.0"),
]


def _said(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.message for record in caplog.records if record.name.startswith("lowtide"))


def _step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model.zero_grad()
    loss = model(x)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def _equal(model: nn.Module, plain: nn.Module, x: torch.Tensor) -> bool:
    return all(map(torch.equal, _step(model, x), _step(plain, x)))


@pytest.mark.parametrize(("change", "said"), _CHANGES)
def test_changes_are_followed(change: Callable[[Any], None], said: str, caplog: pytest.LogCaptureFixture) -> None:
    """With a plan of their own, and back with the first one."""
    model, x = _Model(), torch.randn(4, 8)
    plain, first = copy.deepcopy(model), copy.deepcopy(model)
    lowtide.rematerialize(model, (x,), budget="100%", planner="greedy")
    assert _equal(model, plain, x)
    change(model)
    change(plain)
    with caplog.at_level(logging.INFO, logger="lowtide"):
        assert _equal(model, plain, x)
        assert _equal(model, plain, x)
    assert _said(caplog).count("is captured again") == 1, _said(caplog)
    assert said in _said(caplog)
    assert len(lowtide.plans(model)) == 2
    if change in (_type_alone, _drop, _configure, _number):
        for name in ("alpha", "not_a_number"):
            setattr(model, name, getattr(first, name))
        model.dropout.p, model.config.scale = 0.0, 2.0
        assert _equal(model, first, x)
        assert len(lowtide.plans(model)) == 2


class _Kind(abc.ABC):  # noqa: B024
    pass


class _AsksForItsKind(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.state = nn.Linear(8, 8), SimpleNamespace(factor=2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = 3.0 if isinstance(self.state, _Kind) else self.state.factor
        return (self.linear(x) * factor).square().mean()


def test_only_classes_that_were_there_are_of_consequence_where_they_are_registered(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries that are imported while a model trains register theirs: none that a pass has met an object of."""
    model, x = _AsksForItsKind(), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    lowtide.rematerialize(model, (x,), budget="100%", planner="greedy")
    module = ModuleType("imported_later")
    exec("import abc\nclass Later: pass\nclass LaterKind(abc.ABC): pass", vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with caplog.at_level(logging.INFO, logger="lowtide"):
        _Kind.register(module.Later)
        _Kind.register(module.LaterKind)
        assert _equal(model, plain, x)
        assert "is captured again" not in caplog.text
        module.LaterKind.register(SimpleNamespace)
        assert _equal(model, plain, x)
    assert "what is registered as a _Kind is 1" in _said(caplog)


def test_what_is_not_read_is_of_no_consequence(caplog: pytest.LogCaptureFixture) -> None:
    model, x = _Model(), torch.randn(4, 8)
    lowtide.rematerialize(model, (x,), budget="100%", planner="greedy")
    with caplog.at_level(logging.INFO, logger="lowtide"):
        for _ in range(3):
            model.calls += 1
            model.linear.note = object()
            model(x).backward()
    assert not _said(caplog)


class _Wired(nn.Module):
    """Which of several equal parts does what."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.active = self.first
        self.head = nn.Linear(8, 8)
        self.head.weight = self.first.weight
        self.acts = nn.ModuleDict({"tanh": nn.Tanh(), "relu": nn.ReLU()})
        self.act = self.acts["tanh"]
        self.layers = nn.ModuleList([self.first, self.second, self.first])
        self.register_buffer("one", torch.ones(8))
        self.register_buffer("two", torch.full((8,), 2.0))
        self.register_buffer("mask", self.one)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        for act in self.acts.values():
            x = act(x) + 0.5
        return (self.head(self.act(self.active(x))) * self.mask).square().mean()


def _other_part(model: Any) -> None:
    model.active = model.second


def _other_function(model: Any) -> None:
    model.act = model.acts["relu"]


def _other_order(model: Any) -> None:
    model.acts["tanh"] = model.acts.pop("tanh")


def _other_layers(model: Any) -> None:
    model.layers[2] = model.second


def _other_tie(model: Any) -> None:
    model.head.weight = model.second.weight


def _other_buffer(model: Any) -> None:
    model.mask = model.two


@pytest.mark.parametrize(
    "change", [_other_part, _other_function, _other_order, _other_layers, _other_tie, _other_buffer]
)
def test_equal_parts_exchanged(change: Callable[[Any], None]) -> None:
    torch.manual_seed(0)
    model, x = _Wired(), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    lowtide.rematerialize(model, (x,), budget="100%", planner="greedy")
    assert _equal(model, plain, x)
    change(model)
    change(plain)
    assert _equal(model, plain, x)


def test_methods_of_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = _Model(), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    lowtide.rematerialize(model, (x,), budget="100%", planner="greedy")
    monkeypatch.setattr(_Model, "shift", property(lambda self: 3.0))
    assert _equal(model, plain, x)
    monkeypatch.setattr(_Model, "table_of_class", (0.5,))
    assert _equal(model, plain, x)


class _Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).tanh()
        return (y if self.step < 6 else y * 2).square().mean()


def test_programs_are_shared(caplog: pytest.LogCaptureFixture) -> None:
    """A counter with a threshold: two programs, and as many plans."""
    model, x = _Counted(), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    lowtide.rematerialize(model, (x,), budget="100%", planner="greedy")
    with caplog.at_level(logging.WARNING, logger="lowtide"):
        for step in range(12):
            model.step = plain.step = step
            assert _equal(model, plain, x)
    assert len(lowtide.plans(model)) == 2
    assert not _said(caplog)


def test_other_gradients_of_a_changed_model() -> None:
    """The backward pass makes a program for what it gets: of the model as it is now."""

    class Pair(_Counted):
        def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
            y = self.linear(x).tanh()
            return y * list(range(1, 9))[self.step], y.square().mean()

    model, x = Pair(), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    lowtide.rematerialize(model, (x,), budget="100%", planner="greedy")
    for step in (0, 1, 0, 1):
        model.step = plain.step = step
        for each in (model, plain):
            each.zero_grad()
            each(x)[0].square().sum().backward()
        assert torch.equal(model.linear.weight.grad, plain.linear.weight.grad)
    result = model(x)[0].square().sum()
    result.backward()
    model.step = 5
    loss = model(x)[1]
    model.step = 6
    with pytest.raises(lowtide.ExecutionError, match=r"between a forward pass and its backward pass.*Pair.step is 6"):
        loss.backward()


@pytest.mark.parametrize("mode", ["error", "eager"])
def test_changes_where_new_plans_are_not_wanted(mode: str) -> None:
    model, x = _Model(), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    lowtide.rematerialize(model, (x,), budget="100%", planner="greedy", on_new_signature=mode)
    model.alpha = plain.alpha = 0.2
    if mode == "error":
        with pytest.raises(lowtide.PlanError, match=r"another program than the planned ones .*alpha is 0\.2"):
            model(x)
    else:
        with pytest.warns(UserWarning, match=r"alpha is 0\.2"):
            assert _equal(model, plain, x)
    assert len(lowtide.plans(model)) == 1


class _Drops(nn.Module):
    """Layer drop by a generator that is not torch's."""

    def __init__(self, draw: Callable[[], float], rate: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.draw = draw
        self.rate = rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.draw() < self.rate:
                continue
            x = layer(x).tanh()
        return x.square().mean()


def _uniform() -> float:
    return random.uniform(0, 1)


def _of_numpy() -> float:
    return np.random.random()


def _array() -> float:
    return float(np.random.rand(1)[0])


def _with_draws(model: nn.Module, x: torch.Tensor, seed: int) -> tuple[list[torch.Tensor], Any]:
    random.seed(seed)
    np.random.seed(seed)
    return _step(model, x), (random.getstate(), np.random.random())


@pytest.mark.parametrize("draw", [random.random, _uniform, np.random.rand, _of_numpy, _array])
def test_draws_of_python_and_numpy_are_followed(draw: Callable[[], float]) -> None:
    """The same layers as in eager are left out, and the generators are left as there; four programs at most."""
    model, plain, x = _Drops(draw, 0.5), _Drops(draw, 0.5), torch.randn(4, 8, requires_grad=True)
    plain.load_state_dict(model.state_dict())
    before = random.getstate(), np.random.get_state()
    lowtide.rematerialize(model, (x,), budget="100%", planner="greedy")
    assert random.getstate() == before[0]
    assert all(map(np.array_equal, np.random.get_state(), before[1]))
    for seed in range(12):
        found, state = _with_draws(model, x, seed)
        expected, expected_state = _with_draws(plain, x, seed)
        assert state == expected_state
        assert len(found) == len(expected)
        assert all(map(torch.equal, found, expected))
    assert 2 <= len(lowtide.plans(model)) <= 4


def test_draws_that_decide_nothing_cost_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model, x = _Drops(lambda: random.random(), 0.0), torch.randn(4, 8)
    lowtide.rematerialize(model, (x,), budget="100%", planner="greedy")
    with caplog.at_level(logging.INFO, logger="lowtide"):
        for _ in range(4):
            model(x).backward()
    assert not _said(caplog)


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x * random.random(),
        lambda x: x * np.random.uniform(1, 2),
        lambda x: x * torch.from_numpy(np.random.rand(8).astype("float32")),
        lambda x: x[:, random.randint(0, 3) :],
        lambda x: x.mul_(random.random() + 1),
        lambda x: F.dropout(x, 0.5) * round(random.random(), 2),
        lambda x: x * torch.full((8,), random.random()),
        lambda x: x * 2 if isinstance(random.random(), int) else x * round(random.random(), 1),
        lambda x: x * (1 if {random.random(): 1} else 2),
        lambda x: x * 2 if max(random.random(), random.random()) < 0.7 else x,
    ],
)
def test_draws_that_are_computed_with(use: Callable[[torch.Tensor], torch.Tensor]) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return use(self.linear(x)).square().mean()

    model, x = Scaled(), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    lowtide.rematerialize(model, (x,), budget="100%", planner="greedy")
    for seed in (0, 0, 1, 2, 0):
        found, state = _with_draws(model, x, seed)
        expected, expected_state = _with_draws(plain, x, seed)
        assert state == expected_state
        assert all(map(torch.equal, found, expected))


def test_other_gradients_under_the_same_draws() -> None:
    """Where a backward pass captures again, the forward pass draws what it drew."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> Any:
            y = self.linear(x).tanh() * random.random()
            return y, y.mean()

    model, x = Pair(), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    lowtide.rematerialize(model, (x,), budget="100%", planner="greedy")
    for seed in range(4):
        for each in (model, plain):
            random.seed(seed)
            each.zero_grad()
            each(x)[0].square().sum().backward()
        assert torch.equal(model.linear.weight.grad, plain.linear.weight.grad)


def test_seeds_in_forward() -> None:
    """Where a capture begins in the very state that it leaves."""

    class Seeds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            random.seed(3)
            return self.linear(x).square().mean()

    model, x = Seeds(), torch.randn(4, 8)
    random.seed(3)
    lowtide.rematerialize(model, (x,), budget="100%", planner="greedy")
    random.random()
    model(x).backward()
    state = random.getstate()
    random.seed(3)
    assert random.getstate() == state


def test_another_thread_draws_meanwhile() -> None:
    """It gets its numbers, and the generators' functions are there again afterwards."""
    functions = random.random, random.uniform, np.random.rand
    drawn, done = [], threading.Event()

    def draw() -> None:
        while not done.is_set():
            drawn.append(type(random.random()))

    models = [_Drops(lambda: random.random(), 0.5) for _ in range(2)]

    def plan(model: nn.Module) -> None:
        lowtide.rematerialize(model, (torch.randn(4, 8, requires_grad=True),), budget="100%", planner="greedy")

    threads = [threading.Thread(target=plan, args=(model,)) for model in models]
    bystander = threading.Thread(target=draw)
    for thread in (bystander, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    bystander.join()
    assert set(drawn) == {float}
    assert functions == (random.random, random.uniform, np.random.rand)
    assert [len(lowtide.plans(model)) for model in models] == [1, 1]
    assert "__getattribute__" not in vars(nn.Module)


@pytest.mark.parametrize("late", [False, True], ids=["before the forward pass", "before the backward pass"])
def test_another_thread_captures_meanwhile(late: bool) -> None:
    """What a capture replaces in PyTorch's classes is no change of another thread's model, which keeps its plan."""
    inside, leave = threading.Event(), threading.Event()

    @torch.library.custom_op("lowtide_changes::stays", mutates_args=())
    def stays(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @stays.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        inside.set()
        leave.wait(60)
        return torch.empty_like(x)

    class Stays(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(stays(x))

    class Two(nn.Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = super().forward(x)
            return y.square().mean(), y.sin().sum()

    model, x = Two(8, 8), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    plain(x)[0].backward()
    lowtide.rematerialize(model, (x,), budget="100%", planner="greedy", on_new_signature="error")
    other = threading.Thread(target=lambda: lowtide.plan(Stays(8, 8), (x,), budget="100%"))
    results = model(x) if late else None
    other.start()
    assert inside.wait(60)
    threading.Timer(0.2, leave.set).start()
    loss, _ = model(x) if results is None else results
    loss.backward()
    other.join()
    assert torch.equal(model.weight.grad, plain.weight.grad)
    assert len(lowtide.plans(model)) == 1, "for gradients of the first result alone"


def test_arrays_among_the_arguments() -> None:
    """Two long ones differ, though they are written the same way."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2000, 4)

        def forward(self, x: torch.Tensor, mask: np.ndarray) -> torch.Tensor:
            return self.linear(x * torch.from_numpy(mask)).square().mean()

    model, x = Masked(), torch.randn(3, 2000)
    plain = copy.deepcopy(model)
    masks = [np.zeros(2000, dtype=np.float32) for _ in range(2)]
    masks[1][1000:1010] = 1
    lowtide.rematerialize(model, (x, masks[0]), budget="100%", planner="greedy")
    for mask in masks:
        assert torch.equal(model(x, mask), plain(x, mask))


def _doubling(module: Any, args: Any, *others: Any) -> torch.Tensor:
    """Registered to take keyword arguments, it is given them before the result."""
    result: torch.Tensor = others[-1]
    return result * (2 if len(others) == 1 else 3)


def _hooked_step(model: Any, number: int, with_kwargs: bool) -> torch.Tensor:
    hook = model[0].register_forward_hook(_doubling, with_kwargs=with_kwargs)
    model.zero_grad()
    out: torch.Tensor = model(torch.ones(3, 4)).square().sum()
    out.backward()
    hook.remove()
    return out


def _hookable() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh())


def test_a_hook_that_is_registered_in_each_step_takes_no_capture(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="lowtide"):
        assert_as_eager(_hookable, lambda model, number: _hooked_step(model, number, with_kwargs=False), steps=6)
    assert not [text for text in caplog.messages if "captured again" in text]


def test_whether_a_hook_takes_keyword_arguments_is_noticed() -> None:
    assert_as_eager(_hookable, lambda model, number: _hooked_step(model, number, with_kwargs=number % 3 == 1), steps=6)
