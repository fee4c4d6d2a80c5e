"""Row: what a forward pass writes into dictionaries, lists and objects among its arguments."""

from __future__ import annotations

import copy
import types
import uuid
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lowtide
from lowtide.api import runtime_of

WIDTH = 32


class _Written(nn.Module):
    """Hands what it is given to four blocks by ``forward_of``, which writes into it."""

    def __init__(self, forward_of: Callable[..., Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, WIDTH)) for _ in range(4)
        )
        self.forward_of = forward_of

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward_of(self.blocks, *args, **kwargs)


@dataclass
class _Graph:
    x: torch.Tensor
    name: str = "graph"


class _Store:
    """Attributes are kept in a dictionary of its own, as by data objects of ``torch_geometric``."""

    def __init__(self, **values: Any) -> None:
        self.__dict__["values"] = values

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["values"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__["values"][name] = value


class _Owned:
    """Its store knows it, and is copied with it: as those of ``torch_geometric``."""

    def __init__(self, **values: Any) -> None:
        self.__dict__["store"] = _Store(**values)
        self.store.__dict__["owner"] = weakref.ref(self)

    def __copy__(self) -> Any:
        other = object.__new__(_Owned)
        other.__dict__["store"] = copy.copy(self.store)
        other.store.__dict__["owner"] = weakref.ref(other)
        return other

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.store.owner().store, name, value)


class _Names(dict[str, Any]):
    """Read and written by attributes, as batches of many packages."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__  # type: ignore[assignment]


class _Row(list[Any]):
    pass


def _x(seed: int = 0) -> torch.Tensor:
    return torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(seed))


def _handed_on(blocks: nn.ModuleList, batch: dict[str, Any]) -> torch.Tensor:
    """Keys are added, written again, and taken away."""
    for number, block in enumerate(blocks):
        batch["x"] = batch["x"] + block(batch["x"])
        batch[f"features_{number}"] = batch["x"]
    batch["again"], batch["ran"] = batch["x"], True
    target = batch.pop("target")
    loss: torch.Tensor = (batch["x"] - target).square().mean()
    return loss


def _returned(blocks: nn.ModuleList, batch: dict[str, Any]) -> dict[str, Any]:
    batch["loss"] = _handed_on(blocks, batch)
    return batch


def _of_object(blocks: nn.ModuleList, graph: Any) -> Any:
    for block in blocks:
        graph.x = graph.x + block(graph.x)
    graph.done = len(blocks)
    return graph, [graph.x.mean(), graph]


def _appended(blocks: nn.ModuleList, x: torch.Tensor, kept: list[Any]) -> torch.Tensor:
    for block in blocks:
        x = x + block(x)
        kept.append(x)
    kept.insert(0, {"first": kept[0]})
    return x.square().mean()


def _nested(blocks: nn.ModuleList, inputs: dict[str, Any], targets: list[dict[str, Any]]) -> torch.Tensor:
    for number, target in enumerate(targets):
        target["found"] = blocks[number](inputs["x"])
    targets.append({"number": len(targets)})
    inputs["targets"] = targets
    return torch.stack([(one["found"] - one["x"]).square().mean() for one in targets[:-1]]).sum()


def _counted(blocks: nn.ModuleList, batch: dict[str, Any]) -> torch.Tensor:
    """Numbers and flags are others afterwards, and one item is the last one."""
    batch["calls"] += 1
    batch["mean"] = 0.9 * batch["mean"] + 0.1 * batch["x"].mean().item()
    batch["done"], batch["name"] = not batch["done"], batch.pop("name") + "!"
    loss: torch.Tensor = blocks[0](batch["x"]).square().mean() * batch["calls"]
    return loss


def _nothing_returned(blocks: nn.ModuleList, *, state: OrderedDict[str, Any]) -> None:
    state["x"] = blocks[1](blocks[0](state["x"]))


_CASES: dict[str, tuple[Callable[..., Any], Callable[[], tuple[tuple[Any, ...], dict[str, Any]]], Callable[..., Any]]] = {
    "dictionary": (_handed_on, lambda: (({"x": _x(), "target": _x(1)},), {}), lambda r, a: r + a[0]["features_1"].mean()),
    "returned": (_returned, lambda: (({"x": _x(), "target": _x(1)},), {}), lambda r, a: r["loss"]),
    "only written": (_returned, lambda: (({"x": _x(), "target": _x(1)},), {}), lambda r, a: a[0]["loss"]),
    "dataclass": (_of_object, lambda: ((_Graph(_x()),), {}), lambda r, a: r[1][1].x.square().mean()),
    "namespace": (_of_object, lambda: ((types.SimpleNamespace(x=_x()),), {}), lambda r, a: a[0].x.square().mean()),
    "store": (_of_object, lambda: ((_Store(x=_x()),), {}), lambda r, a: a[0].x.square().mean() + r[1][0]),
    "owned": (_of_object, lambda: ((_Owned(x=_x()),), {}), lambda r, a: a[0].x.square().mean() + r[1][0]),
    "list": (_appended, lambda: ((_x(), []), {}), lambda r, a: r + a[1][2].mean()),
    "nested": (_nested, lambda: (({"x": _x()}, [{"x": _x(1)}, {"x": _x(2)}]), {}), lambda r, a: r),
    "names": (_of_object, lambda: ((_Names(x=_x()),), {}), lambda r, a: r[1][1].x.square().mean()),
    "row": (_appended, lambda: ((_x(), _Row((_x(1),))), {}), lambda r, a: r + a[1][2].mean()),
    "counted": (_counted, lambda: (({"name": "a", "x": _x(), "calls": 1, "mean": 0.5, "done": False},), {}), lambda r, a: r),
    "keyword": (_nothing_returned, lambda: ((), {"state": OrderedDict(x=_x())}), lambda r, a: a[0]["x"].square().mean()),
}  # fmt: skip


def _told(value: Any, given: dict[int, str]) -> Any:
    """What there is to see of a value; of what was ``given``, which it is."""
    if id(value) in given:
        return given[id(value)]
    if isinstance(value, torch.Tensor):
        return value.requires_grad, value.tolist()
    if isinstance(value, dict):
        return [(key, _told(one, given)) for key, one in value.items()]
    if isinstance(value, (list, tuple)):
        return [_told(one, given) for one in value]
    own = vars(value) if hasattr(value, "__dict__") else {}
    return [(name, _told(one, given)) for name, one in own.items() if name != "owner"] or value


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("case", _CASES)
def test_arguments_hold_what_eager_leaves_there(case: str, prepared: bool) -> None:
    """The same objects, the same order; the model is one program."""
    forward_of, batch, loss_of = _CASES[case]
    torch.manual_seed(0)
    plain = _Written(forward_of)
    model = copy.deepcopy(plain)
    lowtide.rematerialize(
        model, *(batch() if prepared else ()), budget="80%", planner="greedy", on_capture_error="error"
    )
    for number in range(3):
        found = []
        for each in (plain, model):
            torch.manual_seed(number)
            each.zero_grad()
            args, kwargs = batch()
            result = each(*args, **kwargs)
            given = [*args, *kwargs.values()]
            loss_of(result, given).backward()
            names = {id(one): f"argument {index}" for index, one in enumerate(given)}
            contents = [
                _told(
                    vars(one) if hasattr(one, "__dict__") else [*one.items()] if isinstance(one, dict) else [*one],
                    names,
                )
                for one in given
                if not isinstance(one, torch.Tensor)
            ]
            found.append([contents, _told(result, names), *(_told(p.grad, {}) for p in each.parameters())])
        assert found[0] == found[1]
    runtime = runtime_of(model)
    assert runtime is not None
    assert runtime.parts is None and not runtime.is_online
    assert runtime.ran == 3


def _by_both_names(blocks: nn.ModuleList, one: dict[str, Any], other: dict[str, Any]) -> torch.Tensor:
    one["y"] = blocks[0](one["x"])
    return (other["y"] * 2 if "y" in other else one["y"]).square().mean()  # type: ignore[no-any-return]


def _kept_elsewhere(blocks: nn.ModuleList, batch: dict[str, Any]) -> torch.Tensor:
    batch["y"] = blocks[0](batch["x"])
    blocks.latest = batch  # type: ignore[assignment]
    return batch["y"].square().mean()  # type: ignore[no-any-return]


def _twice() -> tuple[Any, ...]:
    batch = {"x": _x()}
    return batch, batch


class _Calls:
    def __init__(self) -> None:
        self.x, self.calls, self.mean, self.odd = _x(), 0, 0.5, False


def _count_on(blocks: nn.ModuleList, state: _Calls) -> torch.Tensor:
    state.calls += 1
    state.odd = state.calls % 2 == 1
    y: torch.Tensor = blocks[0](state.x)
    state.mean = 0.9 * state.mean + 0.1 * y.detach().mean().item()
    return y.square().mean() * (2 if state.odd else 3)


def test_a_state_that_goes_from_call_to_call() -> None:
    torch.manual_seed(0)
    plain = _Written(_count_on)
    model = copy.deepcopy(plain)
    states = [_Calls(), _Calls()]
    lowtide.rematerialize(model, budget="80%", planner="greedy", on_capture_error="error")
    for number in range(8):
        found = []
        for each, state in zip((plain, model), states, strict=True):
            torch.manual_seed(number)
            each.zero_grad()
            each(state).backward()
            found.append([_told(vars(state), {}), *(_told(p.grad, {}) for p in each.blocks[0].parameters())])
        assert found[0] == found[1]
    runtime = runtime_of(model)
    assert runtime is not None and runtime.parts is None


@dataclass(slots=True)
class _Slots:
    x: torch.Tensor
    calls: int = 0


class _Mixed:
    __slots__ = ("__dict__", "calls")

    def __init__(self) -> None:
        self.x, self.calls, self.seen = _x(), 0, 0


class _Counting(dict[str, Any]):
    calls = 0

    def __setitem__(self, key: str, value: Any) -> None:
        self.calls += 1
        super().__setitem__(key, value)


class _Doubling(dict[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value * 2)


def _mixed(one: Any) -> None:
    one.calls += 1
    one.seen += 1


_HIDDEN: dict[str, tuple[Callable[[], Any], Callable[[Any], None], Callable[[Any], Any]]] = {
    "an array of no dimension": (
        lambda: {"x": _x(), "array": np.array(1.0)},
        lambda one: one["array"].__iadd__(1),
        lambda one: one["array"].tolist(),
    ),
    "slots of an object without tensors": (
        lambda: {"x": _x(), "slots": _Slots(None)},  # type: ignore[arg-type]
        lambda one: setattr(one["slots"], "calls", one["slots"].calls + 1),
        lambda one: one["slots"].calls,
    ),
    "slots": (lambda: _Slots(_x()), lambda one: setattr(one, "calls", one.calls + 1), lambda one: one.calls),
    "slots and attributes": (_Mixed, _mixed, lambda one: (one.calls, one.seen)),
    "an array": (
        lambda: {"x": _x(), "array": np.zeros(2), "n": 0},
        lambda one: one.update(n=one["array"].__iadd__(1)[0]),
        lambda one: (one["array"].tolist(), one["n"]),
    ),
    "bytes": (
        lambda: {"x": _x(), "bytes": bytearray(2), "n": 0},
        lambda one: one.update(n=one["bytes"].append(7) or 1),
        lambda one: (bytes(one["bytes"]), one["n"]),
    ),
    "attributes of a dictionary": (
        lambda: _Counting(x=_x()),
        lambda one: one.__setitem__("n", 1),
        lambda one: (one.calls, one.get("n")),
    ),
    "what a dictionary makes of an item": (
        lambda: _Doubling(x=_x(), n=1),
        lambda one: one.__setitem__("n", one["n"] + 1),
        lambda one: one["n"],
    ),
}


@pytest.mark.parametrize("case", _HIDDEN)
def test_what_is_written_where_few_look(case: str) -> None:
    make, write, told = _HIDDEN[case]

    def forward_of(blocks: nn.ModuleList, one: Any) -> torch.Tensor:
        y: torch.Tensor = blocks[0](one["x"] if isinstance(one, dict) else one.x)
        write(one)
        return y.square().mean()

    torch.manual_seed(0)
    plain = _Written(forward_of)
    model, sample = copy.deepcopy(plain), make()
    lowtide.rematerialize(model, (sample,), budget="100%", planner="greedy")
    assert told(sample) == told(make())
    kept = [make(), make()]
    for number in range(3):
        for given in (kept, [make(), make()]):
            found = []
            for each, one in zip((plain, model), given, strict=True):
                torch.manual_seed(number)
                each.zero_grad()
                each(one).backward()
                found.append([told(one), *(_told(p.grad, {}) for p in each.blocks[0].parameters())])
            assert found[0] == found[1]


@pytest.mark.parametrize("fresh", [False, True])
def test_what_no_guard_sees_is_no_result(fresh: bool) -> None:
    """A name that the system makes, over another one or where there was none."""

    def forward_of(blocks: nn.ModuleList, batch: dict[str, Any]) -> torch.Tensor:
        batch["name"] = uuid.uuid4().hex
        return blocks[0](batch["x"]).square().mean()  # type: ignore[no-any-return]

    model = _Written(forward_of)
    lowtide.rematerialize(model, budget="100%", planner="greedy")
    names = set()
    for _ in range(3):
        batch = {"x": _x()} if fresh else {"x": _x(), "name": ""}
        model(batch).backward()
        names.add(batch["name"])
    assert len(names) == 3


@pytest.mark.parametrize(
    ("forward_of", "batch"),
    [
        (_by_both_names, _twice),
        (_kept_elsewhere, lambda: ({"x": _x()},)),
    ],
)
def test_what_no_program_writes(forward_of: Callable[..., Any], batch: Callable[[], tuple[Any, ...]]) -> None:
    """One dictionary twice, and what the model keeps as well."""
    torch.manual_seed(0)
    plain = _Written(forward_of)
    model = copy.deepcopy(plain)
    with pytest.raises(lowtide.CaptureError, match="among its arguments"):
        lowtide.rematerialize(copy.deepcopy(plain), batch(), budget="100%", on_capture_error="error")
    lowtide.rematerialize(model, budget="100%")
    for number in range(3):
        found = []
        for each in (plain, model):
            torch.manual_seed(number)
            each.zero_grad()
            args = batch()
            each(*args).backward()
            found.append([_told(args, {}), *(_told(p.grad, {}) for p in each.blocks[0].parameters())])
        assert found[0] == found[1]


def test_one_dictionary_twice_in_a_later_call() -> None:
    torch.manual_seed(0)
    plain = _Written(_by_both_names)
    model = copy.deepcopy(plain)
    lowtide.rematerialize(model, ({"x": _x()}, {"x": _x()}), budget="100%")
    for args in (({"x": _x()}, {"x": _x()}), _twice(), ({"x": _x()}, {"x": _x()})):
        torch.manual_seed(0)
        losses = []
        for each in (plain, model):
            torch.manual_seed(0)
            losses.append(each(*copy.deepcopy(args)))
        assert torch.equal(*losses)


def test_what_a_model_only_holds_is_no_condition(caplog: pytest.LogCaptureFixture) -> None:
    """Whether the model holds what its call has written into is asked past its code: a log that grows is not read."""
    caplog.set_level("INFO", "lowtide")
    model: Any = _Written(lambda blocks, batch: batch.update(y=blocks[0](batch["x"])) or batch)
    model.log = []
    lowtide.rematerialize(model, ({"x": _x()},), budget="100%")
    for number in range(3):
        model({"x": _x()})["y"].square().sum().backward()
        model.log.append(f"step {number}")
    assert "captured again" not in caplog.text
    assert len(lowtide.plans(model)) == 1
