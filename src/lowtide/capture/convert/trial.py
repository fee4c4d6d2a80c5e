"""What foreign operators do beside returning results.

A schema declares what an operator writes, and a tag that it draws random numbers. Nothing can declare that its results depend
on its arguments alone, and a plan that runs it again relies on that. So an operator whose schema declares it functional is
tried before it is believed, twice on made-up tensors from the same states of all generators:

=================================================  ==============================================================
it                                                 is
=================================================  ==============================================================
returns the same bits, and leaves all as it was    pure: it may be run again
moves the generator of its device alone            random: it may be run again from the state it began with
returns other bits, draws from Python's or          run once, in order, and its results are kept
NumPy's generator, changes what its code can name
declares an effect, or cannot be tried             the same
writes into an argument, returns a part of one,    refused: its registration is wrong
or another layout than its fake implementation
=================================================  ==============================================================

What only the first run changes is a cache. What operators written in C++ keep inside cannot be seen, but for its effect on
results.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._library import custom_ops
from torch.utils import _pytree as pytree

from lowtide.capture.python_state.code.code_names import is_trusted, named_by
from lowtide.capture.python_state.effects import random_numbers
from lowtide.capture.python_state.guards.reach import Reach
from lowtide.capture.trace.sizes import hint, hints
from lowtide.errors import CaptureError
from lowtide.program import foreign, generators
from lowtide.program.clocks import ASK
from lowtide.program.layouts import span_elements

_LOG = logging.getLogger(__name__)
_KNOWN: dict[Any, Nature] = {}  # by operator and its arguments other than tensors and sizes


@dataclass(frozen=True, slots=True)
class Nature:
    """``effect``: why the operator runs only once. ``random``: whether it draws from the generator of its device."""

    random: bool = False
    effect: str = ""


def nature(node: fx.Node, module: fx.GraphModule) -> Nature:
    """The nature of the foreign operator that a node calls. Raises ``CaptureError`` if its registration is wrong."""
    target: Any = node.target
    if target is ASK:
        return Nature(effect="asks a clock")
    if foreign.declares_effect(target):
        return Nature(effect="declares that it has an effect")
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: _value(each, module))
    leaves, structure = pytree.tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    seeded = torch.Tag.nondeterministic_seeded in target.tags
    if any(tensor.device.type == "meta" for tensor in tensors):  # no operator will really run
        return Nature(random=seeded)
    key = (target, tuple(leaf for leaf in leaves if isinstance(leaf, (bool, float, str))), str(structure))
    if key not in _KNOWN:
        device = next((tensor.device for tensor in tensors), torch.device("cpu"))
        _KNOWN[key] = found = _tried(target, leaves, structure, node.meta.get("val"), device, seeded)
        if found.effect:
            _LOG.warning("operator %s %s: it runs once in a step, and its results are kept", target, found.effect)
    return _KNOWN[key]


def _value(node: fx.Node, module: fx.GraphModule) -> Any:
    value = node.meta.get("val")
    return operator.attrgetter(str(node.target))(module) if value is None else value


def _tried(
    target: Any, leaves: Sequence[Any], structure: Any, expected: Any, device: torch.device, seeded: bool
) -> Nature:
    foreign.KEEPING[target] = lambda: _kept(target)
    given = [_stand_in(leaf) for leaf in leaves]
    before = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in given]
    with (
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
        generators.kept(torch.device("cpu")),
        generators.kept(device),
        foreign.unseen(target),
    ):
        start = _States(device)
        try:
            first = _run(target, given, structure)
            start.put_back()
            reach = _behind(target)
            second = _run(target, given, structure)
        except Exception as error:  # noqa: BLE001 - whatever it says to numbers that are made up
            return Nature(seeded, f"cannot be tried on made-up tensors ({type(error).__name__}: {_line(error)})")
        _check(target, given, before, second, expected)
        return _judged(start.moved(), reach.changed(), _same(first, second), device, seeded)


def _judged(moved: Sequence[str], changed: Sequence[str], same: bool, device: torch.device, seeded: bool) -> Nature:
    own = [device.type] if device.type in moved else []
    others = [name for name in moved if name not in own]
    if others:
        return Nature(effect=f"draws from the random generator of {others[0]}")
    if changed:
        return Nature(effect=f"changes {', '.join(changed)}")
    if not same:
        return Nature(effect="returns other results for the same arguments")
    return Nature(random=seeded or bool(own))


class _States:
    """The states of the generators that an operator may draw from, when this was made."""

    def __init__(self, device: torch.device) -> None:
        self._generators = {one.type: generators.default_generator(one) for one in (torch.device("cpu"), device)}
        self._torch = {name: one.get_state() for name, one in self._generators.items()}
        self._others = random_numbers.state()

    def put_back(self) -> None:
        for name, state in self._torch.items():
            self._generators[name].set_state(state)
        random_numbers.set_state(self._others)

    def moved(self) -> list[str]:
        """Which generators have another state now."""
        names = [name for name, one in self._generators.items() if not torch.equal(one.get_state(), self._torch[name])]
        both = zip(("Python", "NumPy"), self._others, random_numbers.state(), strict=True)
        return names + [name for name, then, now in both if not random_numbers.same_state((then,), (now,))]


def _behind(target: Any) -> Reach:
    """What the Python implementations of an operator can change; nothing if it has none."""
    reach = Reach()
    registered: Any = custom_ops.OPDEFS.get(target._schema.name)
    if registered is not None:
        for kernel in {registered._init_fn, *registered._backend_fns.values()}:
            reach.add((function, target._schema.name) for function in _wrapped(kernel))
    return reach


def _wrapped(kernel: Any, depth: int = 3) -> Iterator[Any]:
    """A function, and the functions that PyTorch wraps in it."""
    yield kernel
    if depth and isinstance(kernel, types.FunctionType) and is_trusted(kernel):
        for _, inner in named_by(kernel):
            if isinstance(inner, types.FunctionType):
                yield from _wrapped(inner, depth - 1)


@contextlib.contextmanager
def _kept(target: Any) -> Iterator[None]:
    reach = _behind(target)
    try:
        yield
    finally:
        reach.put_back()


def _run(target: Any, given: Sequence[Any], structure: Any) -> list[torch.Tensor]:
    args, kwargs = pytree.tree_unflatten(given, structure)
    return [leaf for leaf in pytree.tree_leaves(target(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]


def _check(target: Any, given: Sequence[Any], before: Sequence[Any], results: Sequence[Any], expected: Any) -> None:
    """Raise ``CaptureError`` if the operator does not behave as it was registered."""
    tensors = [leaf for leaf in given if isinstance(leaf, torch.Tensor)]
    if not target._schema.is_mutable and not _same(
        tensors, [leaf for leaf in before if isinstance(leaf, torch.Tensor)]
    ):
        raise _wrong(
            target, "writes into an argument that its schema declares as read alone. Declare it (mutates_args)"
        )
    storages = {tensor.untyped_storage()._cdata for tensor in tensors}
    if any(one.untyped_storage()._cdata in storages for one in results):
        raise _wrong(target, "returns memory of one of its arguments, which its schema does not declare. Return a copy")
    fakes = [leaf for leaf in pytree.tree_leaves(expected) if isinstance(leaf, torch.Tensor)]
    layouts = [[(hints(one.shape), hints(one.stride()), one.dtype) for one in found] for found in (fakes, results)]
    for number, (promised, real) in enumerate(zip(*layouts, strict=False)):
        if promised != real:
            raise _wrong(
                target,
                f"has a fake implementation that returns another layout (result {number}: shape {promised[0]}, stride "
                f"{promised[1]}, {promised[2]}) than it does ({real[0]}, {real[1]}, {real[2]}). Correct it (register_fake)",
            )


def _wrong(target: Any, what: str) -> CaptureError:
    return CaptureError(f"operator {target} {what}, or run the model under lowtide.online.")


def _same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """Whether both are equal to the bit."""
    return len(one) == len(other) and all(torch.equal(_bits(a), _bits(b)) for a, b in zip(one, other, strict=True))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def _stand_in(leaf: Any) -> Any:
    """A tensor with the same layout: normally distributed numbers, zeros (valid indices), or true."""
    if not isinstance(leaf, torch.Tensor):
        return hint(leaf)
    shape, stride = hints(leaf.shape), hints(leaf.stride())
    flat = torch.zeros(span_elements(shape, stride), dtype=leaf.dtype, device=leaf.device)
    if leaf.dtype is torch.bool:
        flat.fill_(True)
    elif leaf.dtype.is_floating_point or leaf.dtype.is_complex:
        flat.copy_(torch.randn(flat.shape, generator=torch.Generator().manual_seed(0)))
    return flat.as_strided(shape, stride)


def _line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
