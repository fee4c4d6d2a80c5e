"""More of what a model is made of, and of what is around it, changed between two steps (see ``test_module_changes``)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import _symbolic_trace

from lowtide.capture.trace.patches import replaced
from tests.fuzz.changed import Computes, follows, having, part_of, rows


class Doubled:
    """Reads past what its owner has no attribute for."""

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return owner.__dict__.get("number", 1.0) * 2


def _numbered(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y * sum(value for name, value in vars(self).items() if name.startswith("number_"))


def _with_buffer(module: Any) -> None:
    module.part = nn.Tanh()
    module.part.register_buffer("table", torch.ones(1), persistent=False)


class Compiled(nn.Module):
    """To be compiled by ``torch.jit``."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 1.0

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return y * self.number


@torch.library.custom_op("lowtide_tests::copied", mutates_args=())
def copied(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def _backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    return gradient * _FACTORS[0]


_FACTORS = [1.0]
copied.register_fake(torch.empty_like)
copied.register_autograd(_backward)
_ONE = having(number_1=lambda: 1.0)
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any]]] = {
    "another attribute among all of the model's": (
        lambda: Computes(_numbered, _ONE),
        lambda m: setattr(m, "number_2", 2.0),
    ),
    "another name among all of the model's": (
        lambda: Computes(lambda s, y, x: y * len([name for name in dir(s) if name.startswith("number_")]), _ONE),
        lambda m: setattr(m, "number_2", 2.0),
    ),
    "an attribute less among all of the model's": (
        lambda: Computes(_numbered, having(number_1=lambda: 1.0, number_2=lambda: 1.0)),
        lambda m: delattr(m, "number_2"),
    ),
    "another dictionary of the model's attributes": (
        lambda: Computes(lambda s, y, x: y * s.number_1, _ONE),
        lambda m: setattr(m, "__dict__", {**vars(m), "number_1": 2.0}),
    ),
    "an attribute behind a descriptor of the model's": (
        lambda: type("Described", (Computes,), {"twice": Doubled()})(lambda s, y, x: y * s.twice),
        lambda m: setattr(m, "number", 2.0),
    ),
    "a buffer that is saved from now on": (
        lambda: Computes(lambda s, y, x: y * (1 + len(s.part.state_dict())), _with_buffer),
        lambda m: m.part._non_persistent_buffers_set.clear(),
    ),
    "another name of a submodule": (
        lambda: Computes(lambda s, y, x: y * len("".join(name for name, _ in s.named_modules())), having(part=nn.Tanh)),
        lambda m: m._modules.update(another=m._modules.pop("part")),
    ),
    "attribute of a compiled module": (
        lambda: Computes(part_of, having(part=lambda: torch.jit.script(Compiled()))),
        lambda m: setattr(m.part, "number", 2.0),
    ),
    "number in the gradient of an operator": (
        lambda: Computes(lambda s, y, x: torch.ops.lowtide_tests.copied(y)),
        lambda m: _FACTORS.__setitem__(0, 2.0),
    ),
    "another gradient of an operator": (
        lambda: Computes(lambda s, y, x: copied(y)),
        lambda m: copied.register_autograd(lambda ctx, gradient: gradient * 3),
    ),
    "another class of the model, of the same forward": (
        lambda: type("Numbered", (Computes,), {"number": 1.0})(lambda s, y, x: y * s.number),
        lambda m: setattr(m, "__class__", type("Other", (type(m),), {"number": 2.0})),
    ),
}


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    _FACTORS[0] = 1.0
    copied.register_autograd(_backward)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", CASES)
def test_changes_between_steps(name: str) -> None:
    make, change = CASES[name]
    follows(make(), change)


# How code reads the values of a constant tensor, and how these become others without a write that PyTorch counts.
VALUES: dict[str, Callable[[torch.Tensor], float]] = {
    "item": lambda table: table[0].item(),
    "truth": lambda table: 1.0 + bool(table[0] > 1),
    "list": lambda table: table.tolist()[0],
    "array": lambda table: float(table.numpy()[0]),
    "text": lambda table: len(f"{table * 1000}"),
}
WRITES: dict[str, Callable[[Any], Any]] = {
    "other data": lambda m: setattr(m.table, "data", torch.full((2,), 300.0)),
    "other memory": lambda m: m.table.set_(torch.full((2,), 300.0)),
    "written past its history": lambda m: m.table.data.fill_(300),
    "written by NumPy": lambda m: m.table.numpy().fill(300),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("read", VALUES)
def test_values_of_a_constant_tensor(read: str, write: str) -> None:
    value = VALUES[read]
    follows(Computes(lambda s, y, x: y * value(s.table), having(table=lambda: torch.ones(2))), WRITES[write])


def test_a_constant_tensor_gets_a_gradient() -> None:
    model = Computes(lambda s, y, x: y * (1 if s.table.grad is None else 2), having(table=lambda: torch.ones(2)))
    follows(model, lambda m: setattr(m.table, "grad", torch.ones(2)))


def _with_gradient() -> torch.Tensor:
    made = rows()
    made.grad = torch.full_like(made, 2.0)
    return made


def test_gradients_of_arguments() -> None:
    model = Computes(lambda s, y, x: y if x.grad is None else y * x.grad)
    follows(model, lambda m: (_with_gradient(),))


@contextlib.contextmanager
def _casting_to_half() -> Iterator[None]:
    before = torch.get_autocast_dtype("cpu")
    torch.set_autocast_dtype("cpu", torch.float16)
    yield
    torch.set_autocast_dtype("cpu", before)


def _cast(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu"):
        return (y @ x.T).float()


def _called(before: Callable[..., Any]) -> Callable[..., Any]:
    return lambda module, *args: before(module, *args) * (2 if isinstance(module, nn.Tanh) else 1)


AROUND: dict[str, tuple[Any, Callable[[], contextlib.AbstractContextManager[Any]]]] = {
    "what an autocast in the model casts to": (_cast, _casting_to_half),
    "function that a layer calls": (
        lambda s, y, x: y,
        lambda: replaced(F, "linear", lambda *args, before=F.linear: before(*args) * 2),
    ),
    "function that a function calls": (
        lambda s, y, x: F.multi_head_attention_forward(*_attention(s.linear, y))[0],
        lambda: replaced(F, "softmax", lambda *args, before=F.softmax, **more: before(*args, **more) * 2),
    ),
    "how modules are called": (part_of, lambda: replaced(nn.Module, "_call_impl", _called(nn.Module._call_impl))),
}


def _attention(layer: nn.Linear, y: torch.Tensor) -> tuple[Any, ...]:
    weights = torch.cat([layer.weight] * 3)
    return y, y, y, 4, 2, weights, None, None, None, False, 0.0, layer.weight, None


@pytest.mark.parametrize("name", AROUND)
def test_what_is_around(name: str) -> None:
    compute, around = AROUND[name]
    follows(Computes(compute, having(part=nn.Tanh)), lambda m: None, around=around)


def test_that_it_is_traced_is_not_told() -> None:
    _symbolic_trace.is_fx_tracing_warning()
    follows(
        Computes(lambda s, y, x: y * (1 + _symbolic_trace.is_fx_tracing()) * s.number, having(number=lambda: 1.0)),
        lambda m: setattr(m, "number", 2.0),
    )
