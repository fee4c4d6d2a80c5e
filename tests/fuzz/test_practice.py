# ruff: noqa: E501
"""Changes between two steps as training code makes them: adapters, hooks, schedules, patched functions, flags of PyTorch's."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

from lowtide.capture.trace.patches import replaced
from tests.fuzz.changed import Computes, follows, having, part_of

Case = tuple[Callable[..., Any], Callable[[Any], Any], Callable[[Any], Any]]


class Steers:
    """A hook with a state, which adds a direction."""

    def __init__(self) -> None:
        self.direction, self.scale = torch.ones(4), 1.0

    def __call__(self, module: nn.Module, args: Any, result: torch.Tensor) -> torch.Tensor:
        return result + self.direction * self.scale

    def called(self, module: nn.Module, args: Any, result: torch.Tensor) -> torch.Tensor:
        return self(module, args, result)

    @staticmethod
    def scaling(held: Any, x: torch.Tensor) -> Any:
        return x * held[0]


def _held(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = self.held[0](y)
    return made


def _hooked(make: Callable[[], Any]) -> Callable[[Any], None]:
    def prepare(module: Any) -> None:
        module.part = nn.Tanh()
        module.part.register_forward_hook(make())

    return prepare


def _hook(module: Any) -> Any:
    return next(iter(module.part._forward_hooks.values()))


def _scaling(held: Any, *args: Any) -> Any:
    return args[-1] * held[0]


def _scaled(held: Any, forward: Callable[..., Any], x: torch.Tensor) -> Any:
    return forward(x) * held[0]


def _hooked_in_a_list(module: Any) -> None:
    module.held = [nn.Tanh()]
    module.held[0].register_forward_hook(Steers())


def _scaler() -> Any:
    made = torch.amp.GradScaler("cpu", init_scale=1.0)
    made.scale(torch.ones(1))
    return made


def _polynomial(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = y * float(self.poly(2.0))
    return made


_BOUND = _hooked(lambda: Steers().called)
_PARTIAL = _hooked(lambda: functools.partial(_scaling, [1.0]))
_SCALED = having(part=lambda: functools.partial(_scaling, [1.0]))
_STEERED = having(part=lambda: functools.partial(Steers().called, nn.Tanh(), ()))
CASES: dict[str, dict[str, Case]] = {
    "hooks with a state": {
        "number of a hook": (part_of, _hooked(Steers), lambda m: setattr(_hook(m), "scale", 2.0)),
        "tensor of a hook, written": (part_of, _hooked(Steers), lambda m: _hook(m).direction.mul_(2)),
        "tensor of a hook, replaced": (part_of, _hooked(Steers), lambda m: setattr(_hook(m), "direction", torch.zeros(4))),
        "number behind a method as a hook": (part_of, _BOUND, lambda m: setattr(_hook(m).__self__, "scale", 2.0)),
        "tensor behind a method as a hook": (part_of, _BOUND, lambda m: _hook(m).__self__.direction.mul_(2)),
        "argument of a partial as a hook": (part_of, _PARTIAL, lambda m: _hook(m).args[0].__setitem__(0, 2.0)),
        "hook of a module that is not registered": (_held, _hooked_in_a_list, lambda m: setattr(next(iter(m.held[0]._forward_hooks.values())), "scale", 2.0)),
    },
    "what PyTorch keeps for training": {
        "scale of a gradient scaler": (lambda s, y, x: y * s.scaler.get_scale(), having(scaler=_scaler), lambda m: m.scaler._scale.mul_(2)),
        "scale of a gradient scaler that has not run": (lambda s, y, x: y * s.scaler.get_scale(), having(scaler=lambda: torch.amp.GradScaler("cpu")), lambda m: setattr(m.scaler, "_init_scale", 2.0)),
        "buffers that are not saved": (lambda s, y, x: y * (1 + len(s._non_persistent_buffers_set)), lambda m: m.register_buffer("table", torch.ones(1)), lambda m: m._non_persistent_buffers_set.add("table")),
    },
    "NumPy's own classes": {
        "coefficients of a polynomial, written": (_polynomial, having(poly=lambda: np.polynomial.Polynomial([1.0, 2.0])), lambda m: m.poly.coef.__setitem__(0, 9.0)),
        "coefficients of a polynomial, replaced": (_polynomial, having(poly=lambda: np.polynomial.Polynomial([1.0, 2.0])), lambda m: setattr(m.poly, "coef", np.array([9.0, 9.0]))),
        "coefficients of one of one dimension": (_polynomial, having(poly=lambda: np.poly1d([1.0, 2.0])), lambda m: m.poly.__setitem__(0, 9.0)),
        "numbers behind a mask": (lambda s, y, x: y * float(s.numbers.sum()), having(numbers=lambda: np.ma.array([1.0, 2.0], mask=[0, 1])), lambda m: m.numbers.__setitem__(0, 5.0)),
    },
    "functions with arguments": {
        "argument of a partial of a static method": (part_of, having(part=lambda: functools.partial(vars(Steers)["scaling"], [1.0])), lambda m: m.part.args[0].__setitem__(0, 2.0)),
        "argument of a partial": (part_of, _SCALED, lambda m: m.part.args[0].__setitem__(0, 2.0)),
        "tensor in a partial": (part_of, having(part=lambda: functools.partial(torch.mul, torch.ones(4))), lambda m: m.part.args[0].mul_(2)),
        "number behind a method in a partial": (part_of, _STEERED, lambda m: setattr(m.part.func.__self__, "scale", 2.0)),
        "tensor behind a method in a partial": (part_of, _STEERED, lambda m: m.part.func.__self__.direction.mul_(2)),
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=name) for group in CASES.values() for name, case in group.items()]
)
def test_changes_between_steps(case: Case) -> None:
    compute, prepare, change = case
    torch.manual_seed(0)
    follows(Computes(compute, prepare), lambda model: (change(model), None)[1])


def test_what_a_forward_method_of_the_model_itself_holds() -> None:
    model, held = Computes(lambda self, y, x: y), [1.0]
    model.forward = functools.partial(_scaled, held, model.forward)  # type: ignore[method-assign]
    follows(model, lambda model: held.__setitem__(0, 2.0))


def _twice(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: function(*args, **kwargs) * 2


def _calling(module: nn.Module, *args: Any) -> Any:
    result = _CALL(module, *args)
    return result * 2 if isinstance(module, nn.Tanh) else result


def _reading(module: Any, name: str) -> Any:
    own = object.__getattribute__
    return own(module, "_parameters")[name] * 2 if name == "weight" else own(module, name)


@contextlib.contextmanager
def _process_group(folder: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{folder / 'group'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@contextlib.contextmanager
def _half_on_accelerators() -> Iterator[None]:
    torch.set_autocast_enabled("cuda", True)
    yield
    torch.set_autocast_enabled("cuda", False)


class Noise(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + torch.rand_like(weight)


def _noisy(module: Any) -> None:
    module.part = nn.Linear(4, 4)
    parametrize.register_parametrization(module.part, "weight", Noise())


@contextlib.contextmanager
def _given(kind: type, name: str, value: Any) -> Iterator[None]:
    """Inside, the class has this under a name that it has nothing of its own under."""
    assert name not in vars(kind)
    setattr(kind, name, value)
    try:
        yield
    finally:
        delattr(kind, name)


class _OwnTanh(nn.Tanh):
    pass


class _OwnLeaky(nn.LeakyReLU):
    pass


_CALL = nn.Module.__call__
_TANH, _MATMUL = having(part=nn.Tanh), torch.backends.cuda.matmul
# name: what is computed, what that needs, and what is around the later steps, in a folder of the test's.
AROUND: dict[str, tuple[Callable[..., Any], Any, Callable[[Path], contextlib.AbstractContextManager[Any]]]] = {
    "function of a library that is called": (lambda s, y, x: F.silu(y), None, lambda _: replaced(F, "silu", _twice(F.silu))),
    "method of tensors": (lambda s, y, x: y.exp(), None, lambda _: replaced(torch.Tensor, "exp", _twice(torch.Tensor.exp))),
    "function of Python's": (lambda s, y, x: y * math.sqrt(4.0), None, lambda _: replaced(math, "sqrt", _twice(math.sqrt))),
    "function of NumPy's": (lambda s, y, x: y * float(np.sqrt(4.0)), None, lambda _: replaced(np, "sqrt", _twice(np.sqrt))),
    "forward of a library's class": (part_of, _TANH, lambda _: replaced(nn.Tanh, "forward", _twice(nn.Tanh.forward))),
    "how modules are called": (part_of, _TANH, lambda _: replaced(nn.Module, "__call__", _calling)),
    "how those of a library's class are called": (part_of, _TANH, lambda _: _given(nn.Tanh, "__call__", _calling)),
    "how those of a library's class are called in the end": (part_of, _TANH, lambda _: _given(nn.Tanh, "_call_impl", _twice(nn.Module._call_impl))),
    "what those of a library's class are asked for": (part_of, having(part=lambda: nn.Linear(4, 4)), lambda _: _given(nn.Linear, "__getattr__", _twice(nn.Module.__getattr__))),
    "how those of a library's class are read": (part_of, having(part=lambda: nn.Linear(4, 4)), lambda _: _given(nn.Linear, "__getattribute__", _reading)),
    "truth of those of a library's class": (lambda s, y, x: s.part(y) if s.part else y, _TANH, lambda _: _given(nn.Tanh, "__bool__", lambda self: False)),
    "how those of a class derived from a library's are called": (part_of, having(part=lambda: _OwnTanh()), lambda _: _given(nn.Tanh, "__call__", _calling)),
    "property of a library's class, of one derived from it": (part_of, having(part=lambda: _OwnLeaky(0.1)), lambda _: _given(nn.LeakyReLU, "negative_slope", property(lambda self: 0.9))),
    "property of a library's class": (part_of, having(part=lambda: nn.LeakyReLU(0.1)), lambda _: _given(nn.LeakyReLU, "negative_slope", property(lambda self: 0.9))),
    "property before a parameter": (part_of, having(part=lambda: nn.Linear(4, 4)), lambda _: _given(nn.Linear, "bias", None)),
    "what a library's class goes through": (part_of, having(part=lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh())), lambda _: replaced(nn.Sequential, "__iter__", lambda self: iter([self[0]]))),
    "parameters that are computed once": (lambda s, y, x: s.part(s.part(y)), _noisy, lambda _: parametrize.cached()),
    "flag of a backend": (lambda s, y, x: y * (1 + _MATMUL.allow_tf32 * torch.backends.cudnn.enabled), None, lambda _: replaced(_MATMUL, "allow_tf32", True)),
    "autocast of another device": (lambda s, y, x: y * (1 + torch.is_autocast_enabled("cuda")), None, lambda _: _half_on_accelerators()),
    "process group": (lambda s, y, x: y * (2 if dist.is_available() and dist.is_initialized() else 1), None, _process_group),
}  # fmt: skip


@pytest.mark.parametrize("name", AROUND)
def test_what_is_around(name: str, tmp_path: Path) -> None:
    compute, prepare, around = AROUND[name]
    torch.manual_seed(0)
    follows(Computes(compute, prepare or (lambda module: None)), lambda model: None, around=lambda: around(tmp_path))


def test_functions_that_a_library_calls() -> None:
    """Those of the modules in which the model's classes are, as kernels of others are put in place of them."""
    transformers = pytest.importorskip("transformers")
    llama = transformers.models.llama.modeling_llama
    sizes = {
        "vocab_size": 16,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = transformers.LlamaConfig(**sizes, bos_token_id=0, eos_token_id=0)

    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = transformers.LlamaModel(config)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.inner(input_ids=ids).last_hidden_state.square().sum()

    def rotated(q: torch.Tensor, k: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return before(q * 2, k, *args, **kwargs)

    before = llama.apply_rotary_pos_emb
    follows(Sums(), lambda m: None, (torch.arange(6)[None],), lambda: replaced(llama, "apply_rotary_pos_emb", rotated))


def test_lists_that_become_one() -> None:
    model = Computes(lambda s, y, x: y * (1 + (s.one is s.two)), having(one=lambda: [1.0], two=lambda: [1.0]))
    follows(model, lambda m: setattr(m, "two", m.one))
