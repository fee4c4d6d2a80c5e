# ruff: noqa: E501
"""Modules, their parts, tensors and hooks are changed between two steps: the next one is as in eager."""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.parametrize as P
from torch import nn
from torch.nn.utils import prune
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fuzz.changed import Computes, Thing, follows, having, part_of, rows

pytestmark = [
    pytest.mark.filterwarnings("ignore:`?torch.nn.utils.weight_norm"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
]


class Scale(nn.Module):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Adapted(nn.Module):
    """A layer with an adapter of low rank, which can be merged into it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4)
        self.down, self.up = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.randn(2, 4))
        self.merged, self.scaling, self.active = False, {"default": 1.0}, ["default"]

    def merge(self) -> None:
        with torch.no_grad():
            self.base.weight += (self.down @ self.up).T
        self.merged = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base(x)
        for name in () if self.merged else self.active:
            y = y + x @ self.down @ self.up * self.scaling[name]
        return y


class Factor(torch.autograd.Function):
    """Its backward pass reads a global number."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return -gradient * _FACTOR


_FACTOR = 1.0
_SHARED = np.ones(4, dtype=np.float32)
_TENSOR = torch.ones(4)


class Constants:
    tensor = torch.ones(4)


def times(y: torch.Tensor, by: torch.Tensor = torch.ones(4)) -> torch.Tensor:  # noqa: B008
    return y * by


def _same(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y


def _buffer(make: Callable[[], torch.Tensor], persistent: bool = True) -> Callable[[Any], None]:
    return lambda module: module.register_buffer("table", make(), persistent)


def _forward_of_class(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.linear(x).sum() * 3


def _fresh(base: type = Computes) -> type:
    return type("Fresh", (base,), {"forward": base.forward})


def _twice(x: Any) -> Any:
    return x * 2


Case = tuple[Callable[[], nn.Module], Callable[[Any], Any]]


def _case(compute: Callable[..., Any], prepare: Callable[[Any], Any], change: Callable[[Any], Any]) -> Case:
    return lambda: Computes(compute, prepare), lambda model: (change(model), None)[1]


def _nothing(module: Any) -> None:
    pass


_PART = having(part=lambda: Adapted())
_DROPOUT = having(part=lambda: nn.Dropout(0.5))
_HELD = having(held=lambda: Thing(items={"a": [torch.ones(4)]}))
_ONES = having(table=lambda: torch.ones(4))


def _held(self: Any, y: torch.Tensor, x: torch.Tensor) -> Any:
    return y * self.held.items["a"][0]


def _hidden(self: Any, y: torch.Tensor, x: torch.Tensor) -> Any:
    return self.hidden[0](y) if isinstance(self.hidden[0], nn.Module) else y * self.hidden[0]


def _table(self: Any, y: torch.Tensor, x: torch.Tensor) -> Any:
    return y * self.table


def _pruned(module: Any) -> None:
    prune.l1_unstructured(module.linear, "weight", 0.5)


def _normed(module: Any) -> None:
    nn.utils.weight_norm(module.linear)


def _scaled(module: Any) -> None:
    P.register_parametrization(module.linear, "weight", Scale())


def _tied(module: Any) -> None:
    module.head = nn.Linear(4, 4)
    module.head.weight = module.linear.weight


def _set(name: str, value: Any) -> Callable[[Any], None]:
    return lambda module: setattr(module, name, value)


CASES: dict[str, Case] = {
    "class's forward": (lambda: _fresh()(_same), lambda m: setattr(type(m), "forward", _forward_of_class)),
    "forward of a base": (lambda: type("Derived", (_fresh(),), {})(_same), lambda m: setattr(type(m).__mro__[1], "forward", _forward_of_class)),
    "forward of a part's class": _case(part_of, having(part=lambda: type("Local", (Scale,), {})()), lambda m: setattr(type(m.part), "forward", lambda self, x: x * 2)),
    "forward of a part": _case(part_of, having(part=Scale), lambda m: setattr(m.part, "forward", _twice)),
    "method of a part": _case(part_of, having(part=Scale), lambda m: setattr(m.part, "forward", types.MethodType(lambda self, x: x * 3, m.part))),
    "inserted layer": _case(lambda s, y, x: functools.reduce(lambda z, layer: layer(z), s.layers, y), having(layers=lambda: nn.ModuleList([Scale(1.0), Scale(2.0)])), lambda m: m.layers.insert(0, Scale(3.0))),
    "order of a ModuleDict": _case(lambda s, y, x: next(iter(s.layers.values()))(y), having(layers=lambda: nn.ModuleDict({"a": Scale(1.0), "b": Scale(2.0)})), lambda m: m.layers.update({"a": m.layers.pop("a")})),
    "swapped in a ParameterList": _case(lambda s, y, x: y * s.pair[0] + s.pair[1] * 3, having(pair=lambda: nn.ParameterList([torch.ones(4), torch.full((4,), 2.0)])), lambda m: (one := m.pair[0], two := m.pair[1], m.pair.__setitem__(0, two), m.pair.__setitem__(1, one))),
    "order of a ParameterDict": _case(lambda s, y, x: y * next(iter(s.pair.values())), having(pair=lambda: nn.ParameterDict({"a": torch.ones(4), "b": torch.full((4,), 2.0)})), lambda m: m.pair.update({"a": m.pair.pop("a")})),
    "hook of a parameter": _case(_same, _nothing, lambda m: m.linear.weight.register_hook(_twice)),
    "hook of the model's gradient": _case(_same, _nothing, lambda m: m.register_full_backward_pre_hook(lambda module, gradient: (gradient[0] * 2,))),
    "hook of the model": _case(_same, _nothing, lambda m: m.register_forward_hook(lambda module, args, result: result * 2)),
    "hook before the model": _case(_same, _nothing, lambda m: m.register_forward_pre_hook(lambda module, args: (args[0] * 2,))),
    "values of an array behind a tensor": _case(lambda s, y, x: y * s.table.sum().item(), having(table=lambda: torch.from_numpy(_SHARED)), lambda m: _SHARED.fill(3.0)),
    "value at an index": _case(lambda s, y, x: y * int(s.table[0]), _ONES, lambda m: m.table.fill_(3)),
    "largest value": _case(lambda s, y, x: y * s.table.max().item(), _ONES, lambda m: m.table.fill_(3)),
    "a value in a tensor": _case(lambda s, y, x: y * (2 if 3 in s.table else 1), _ONES, lambda m: m.table.fill_(3)),
    "a tensor as a slice": _case(lambda s, y, x: y[: s.table], having(table=lambda: torch.tensor(1)), lambda m: m.table.fill_(2)),
    "a tensor as a condition": _case(lambda s, y, x: y * 2 if s.table else y, having(table=lambda: torch.tensor(True)), lambda m: m.table.fill_(False)),
    "equal tensors": _case(lambda s, y, x: y * (2 if torch.equal(s.table, s.other) else 1), having(table=lambda: torch.ones(4), other=lambda: torch.ones(4)), lambda m: m.other.fill_(2)),
    "data of a tensor": _case(_table, _ONES, lambda m: setattr(m.table, "data", torch.full((4,), 2.0))),
    "tensor in an object, written": _case(_held, _HELD, lambda m: m.held.items["a"][0].fill_(3)),
    "tensor in an object, replaced": _case(_held, _HELD, lambda m: m.held.items["a"].__setitem__(0, torch.full((4,), 3.0))),
    "tensor in an object, of another dtype": _case(_held, _HELD, lambda m: m.held.items["a"].__setitem__(0, torch.full((4,), 3.0).double())),
    "global tensor": _case(lambda s, y, x: y * _TENSOR, _nothing, lambda m: _TENSOR.fill_(3)),
    "sum of a global tensor": _case(lambda s, y, x: y * _TENSOR.sum().item(), _nothing, lambda m: _TENSOR.fill_(3)),
    "sum of a tensor of a class": _case(lambda s, y, x: y * Constants.tensor.sum().item(), _nothing, lambda m: Constants.tensor.fill_(3)),
    "tensor in a default": _case(lambda s, y, x: times(y), _nothing, lambda m: times.__defaults__[0].fill_(3)),
    "integers of a buffer": _case(lambda s, y, x: y * s.table.tolist()[0], _buffer(lambda: torch.ones(4, dtype=torch.long)), lambda m: m.table.fill_(3)),
    "a buffer as a range": _case(lambda s, y, x: y * len(range(int(s.table))), _buffer(lambda: torch.tensor(1)), lambda m: m.table.fill_(3)),
    "replaced buffer that is not saved": _case(_table, _buffer(lambda: torch.ones(4), False), _set("table", torch.full((1,), 2.0))),
    "buffer instead of none": _case(lambda s, y, x: y * (s.table if hasattr(s, "table") else 1.0), _nothing, lambda m: m.register_buffer("table", torch.full((4,), 2.0))),
    "parameter instead of none": _case(lambda s, y, x: y * (s.table if hasattr(s, "table") else 1.0), _nothing, lambda m: m.register_parameter("table", nn.Parameter(torch.full((4,), 2.0)))),
    "None instead of a buffer": _case(lambda s, y, x: y * (2.0 if s.table is None else s.table), _buffer(lambda: torch.ones(4)), _set("table", None)),
    "expanded buffer": _case(_table, _buffer(lambda: torch.ones(4)), _set("table", torch.tensor(2.0).expand(4))),
    "layout of a buffer": _case(lambda s, y, x: y * (1 + s.table.is_contiguous()), _buffer(lambda: torch.ones(4, 4)), _set("table", torch.ones(4, 4)[:, ::2])),
    "shape of a parameter": _case(lambda s, y, x: y * s.table.numel() + s.table.sum(), having(table=lambda: nn.Parameter(torch.ones(2))), lambda m: setattr(m.table, "data", torch.ones(5))),
    "tied weights untied": _case(lambda s, y, x: s.head(y), _tied, lambda m: setattr(m.head, "weight", nn.Parameter(torch.ones(4, 4)))),
    "weights tied": _case(lambda s, y, x: s.head(y), having(head=lambda: nn.Linear(4, 4)), lambda m: setattr(m.head, "weight", m.linear.weight)),
    "merged adapter": _case(part_of, _PART, lambda m: m.part.merge()),
    "scaled adapter": _case(part_of, _PART, lambda m: m.part.scaling.update(default=2.0)),
    "adapter switched off": _case(part_of, _PART, lambda m: m.part.active.clear()),
    "scale of a parametrization": _case(_same, _scaled, lambda m: setattr(m.linear.parametrizations.weight[0], "scale", 2.0)),
    "new parametrization": _case(_same, _nothing, lambda m: P.register_parametrization(m.linear, "weight", Scale(2.0))),
    "removed parametrization": _case(_same, _scaled, lambda m: (P.remove_parametrizations(m.linear, "weight"), m.linear.weight.data.mul_(2))),
    "parametrization of the model": _case(_table, having(table=lambda: nn.Parameter(torch.ones(4))), lambda m: P.register_parametrization(m, "table", Scale(2.0))),
    "removed weight_norm": _case(_same, _normed, lambda m: (nn.utils.remove_weight_norm(m.linear), m.linear.weight.data.mul_(2))),
    "magnitude of weight_norm": _case(_same, _normed, lambda m: m.linear.weight_g.data.mul_(2)),
    "new weight_norm": _case(_same, _nothing, lambda m: (_normed(m), m.linear.weight_g.data.mul_(2))),
    "mask of pruning": _case(_same, _pruned, lambda m: m.linear.weight_mask.fill_(1)),
    "pruned": _case(_same, _nothing, _pruned),
    "pruned twice": _case(_same, _pruned, lambda m: prune.random_unstructured(m.linear, "weight", 0.3)),
    "pruning removed": _case(_same, _pruned, lambda m: (prune.remove(m.linear, "weight"), m.linear.weight.data.add_(1))),
    "epsilon of a norm": _case(lambda s, y, x: s.part(y) * y, having(part=lambda: nn.LayerNorm(4)), lambda m: setattr(m.part, "eps", 0.3)),
    "dropout's probability": _case(part_of, _DROPOUT, lambda m: setattr(m.part, "p", 0.1)),
    "dropout in evaluation mode": _case(part_of, _DROPOUT, lambda m: m.part.eval()),
    "dropout by a configuration": _case(lambda s, y, x: F.dropout(y, 0.5, s.training and s.options["on"]), having(options=lambda: {"on": True}), lambda m: m.options.update(on=False)),
    "option of attention": _case(lambda s, y, x: s.part(y, y, y)[0], having(part=lambda: nn.MultiheadAttention(4, 2)), lambda m: setattr(m.part, "add_zero_attn", True)),
    "behind a weak reference to the model": _case(lambda s, y, x: y * s.linear.owner().number, lambda m: (setattr(m, "number", 1.0), vars(m.linear).update(owner=weakref.ref(m))), _set("number", 2.0)),
    "behind a weak reference to a part": _case(lambda s, y, x: s.reference()(y), lambda m: (_DROPOUT(m), setattr(m, "reference", weakref.ref(m.part))), lambda m: m.part.eval()),
    "the model in a list": _case(lambda s, y, x: y * s.linear.owner[0].number, lambda m: (setattr(m, "number", 1.0), vars(m.linear).update(owner=[m])), _set("number", 2.0)),
    "number of state_dict's items": _case(lambda s, y, x: y * len(s.state_dict()), _nothing, lambda m: m.register_buffer("more", torch.ones(1))),
    "number of submodules": _case(lambda s, y, x: y * len(s._modules), _nothing, lambda m: m.add_module("more", nn.Tanh())),
    "number of buffers": _case(lambda s, y, x: y * (1 + len(s._buffers)), _nothing, lambda m: m.register_buffer("more", torch.ones(1))),
    "text of the model": _case(lambda s, y, x: y * len(repr(s.linear)), _nothing, lambda m: setattr(m.linear, "in_features", 40000)),
    "vars of the model": _case(lambda s, y, x: y * vars(s)["number"], having(number=lambda: 1.0), _set("number", 2.0)),
    "dropout that is not registered": _case(_hidden, having(hidden=lambda: [nn.Dropout(0.5)]), lambda m: setattr(m.hidden[0], "p", 0.1)),
    "weight that is not registered, written": _case(_hidden, having(hidden=lambda: [Weighted()]), lambda m: m.hidden[0].weight.fill_(3)),
    "weight that is not registered, replaced": _case(_hidden, having(hidden=lambda: [Weighted()]), lambda m: setattr(m.hidden[0], "weight", nn.Parameter(torch.full((4,), 4.0), False))),
    "parameter that is not registered": _case(_hidden, having(hidden=lambda: [nn.Parameter(torch.ones(4))]), lambda m: m.hidden[0].data.fill_(3)),
    "frozen parameter that is not registered": _case(_hidden, having(hidden=lambda: [nn.Parameter(torch.ones(4))]), lambda m: m.hidden[0].requires_grad_(False).fill_(3)),
    "number read in a backward pass": _case(lambda s, y, x: Factor.apply(y), _nothing, lambda m: globals().update(_FACTOR=2.0)),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _globals_as_before() -> Iterator[None]:
    yield
    globals().update(_FACTOR=1.0)
    _SHARED.fill(1.0)
    for tensor in (_TENSOR, Constants.tensor, times.__defaults__[0]):  # type: ignore[index]
        tensor.fill_(1.0)


@pytest.mark.parametrize("name", CASES)
def test_changes_between_steps(name: str) -> None:
    make, change = CASES[name]
    torch.manual_seed(0)
    follows(make(), change)


@contextlib.contextmanager
def _double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_the_default_dtype() -> None:
    model = Computes(lambda s, y, x: y * (2 if torch.ones(1).dtype == torch.float64 else 1))
    follows(model, _nothing, around=_double)


NUMBERS = torch.tensor([1, 2]), torch.tensor([3, 3])


@pytest.mark.parametrize(
    "read", [lambda n: n.tolist()[0], lambda n: sum(int(one) for one in n), lambda n: n.max().item()]
)
def test_values_of_an_argument(read: Callable[[torch.Tensor], Any]) -> None:
    model = Computes(lambda s, y, x, numbers: y * read(numbers))
    follows(model, lambda m: (rows(), NUMBERS[1]), (rows(), NUMBERS[0]))


@pytest.mark.parametrize("made", [lambda held: lambda y: y * held[0], lambda held: functools.partial(_first, held)])
def test_what_a_function_among_the_arguments_holds(made: Callable[[list[float]], Any]) -> None:
    held = [1.0]
    follows(Computes(lambda s, y, x, score: score(y)), lambda m: held.__setitem__(0, 2.0), (rows(), made(held)))


def _first(held: list[float], y: torch.Tensor) -> torch.Tensor:
    return y * held[0]


class Doubles(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return result * 2 if function is torch.tanh else result


class DoublesOperators(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return result * 2 if function is torch.ops.aten.tanh.default else result


def _hook(kind: str) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    @contextlib.contextmanager
    def hooked() -> Iterator[None]:
        register = getattr(nn.modules.module, kind)
        handle = register(lambda m, a, *o: None if not isinstance(m, nn.Linear) else o[0] * 2 if o else (a[0] * 2,))
        yield
        handle.remove()

    return hooked


@contextlib.contextmanager
def _backward_hook() -> Iterator[None]:
    register = nn.modules.module.register_module_full_backward_hook
    handle = register(lambda m, gradients, *o: (gradients[0] * 2,) if isinstance(m, nn.Tanh) else None)
    yield
    handle.remove()


def _packing() -> contextlib.AbstractContextManager[Any]:
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t if isinstance(t, nn.Parameter) else t * 2, lambda t: t)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize(
    "around",
    [
        _hook("register_module_forward_hook"),
        _hook("register_module_forward_pre_hook"),
        _backward_hook,
        Doubles,
        DoublesOperators,
        _packing,
        lambda: torch.autograd.detect_anomaly(),
    ],
)
def test_what_is_around(around: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
    """Of these some run without a plan, and others have one of their own."""

    def compute(module: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return module.part(y) * (1 + torch.is_anomaly_enabled())

    follows(Computes(compute, lambda m: setattr(m, "part", nn.Tanh())), _nothing, around=around)


def test_an_attribute_of_a_parameter() -> None:
    model = Computes(lambda s, y, x: y * getattr(s.linear.weight, "number", 1.0))
    follows(model, lambda m: setattr(m.linear.weight, "number", 2.0))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_the_gradient_of_a_tensor_that_is_held() -> None:
    model = Computes(
        lambda s, y, x: y * (1.0 if s.table.grad is None else s.table.grad.sum()),
        having(table=lambda: torch.ones(4, requires_grad=True)),
    )
    follows(model, lambda m: setattr(m.table, "grad", torch.ones(4)))
