"""Copies of a model without the data of its tensors."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Mapping, Sequence, Set
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch._library.custom_ops import CustomOpDef

from lowtide.capture.python_state.effects.held_inputs import held_tensors
from lowtide.capture.sharded import copy_module
from lowtide.errors import CaptureError
from lowtide.objects.clones import arrays_as_they_lie, complete_arrays
from lowtide.objects.opaque import CONSTANT
from lowtide.objects.walk import CONTAINERS, GENERATORS, cell_value, closed_over, functions_in, reachable

_SHARED = (  # by a copy and its original
    ModuleType, CustomOpDef, torch._ops.OpOverload, torch._ops.OpOverloadPacket, staticmethod, classmethod,
    torch.finfo, torch.iinfo, torch.fx.Graph, torch.fx.Node, *CONSTANT,
)  # fmt: skip
_BOUND = (partial, MethodType)
_COPYING = ("__deepcopy__", "__getstate__", "__setstate__", "__reduce__", "__reduce_ex__")


def copy_without_data(
    model: nn.Module, state: Sequence[torch.Tensor], others: Sequence[torch.Tensor]
) -> tuple[nn.Module, dict[int, tuple[Any, Any]]]:
    """Copy the module tree deeply, with ``others`` in place of the tensors ``state``; all other tensors are shared.

    Returns the copy, and for each copied object its original and the copy, by the copy's id. Copies that are not in the
    tree are kept there too, so that no id is used twice.
    """
    memo: dict[int, Any] = {id(real): other for real, other in zip(state, others, strict=True)}
    held = [value for m in model.modules() for value in vars(m).values()]
    parts = reachable(held, lambda one: isinstance(one, (*CONTAINERS, partial)))
    # A plain ``object()`` is only identified by being the same object, so it is shared.
    whole = [one for one in parts if isinstance(one, _SHARED) or type(one) is object]
    # GENERATORS: those behind ``random.uniform`` and the like.
    for shared in (*held_tensors(model), *GENERATORS, *whole):
        memo.setdefault(id(shared), shared)
    planned = planned_forward(model)
    if planned is not None:
        memo[id(planned)] = None
    closures = _closures(model, {*map(id, state), *map(id, model.modules())})
    memo |= {id(function): copied for function, copied in closures}
    try:
        with arrays_as_they_lie():
            clone = _copied(model, memo)
            complete_arrays(memo)
    except Exception as error:
        raise CaptureError(
            f"the model cannot be copied ({type(error).__name__}: {error}), and what is captured is a copy of it, so that the "
            "model itself is left alone. Keep what copy.deepcopy refuses outside of the model, in a variable say."
        ) from error
    if planned is not None:
        clone.__dict__.pop("forward", None)  # torch.fx's graph modules do not copy it
        if planned.had_instance_forward:
            memo[id(model)] = clone
            clone.forward = copy.deepcopy(planned.original_forward, memo)
    for function, copied in closures:
        _fill(function, copied, memo)
    for module in model.modules():
        methods = ((name, one) for name, one in vars(module).items() if isinstance(one, MethodType))
        vars(memo[id(module)]).update({name: _of_copy(one, memo) for name, one in methods if id(one.__func__) in memo})
    return clone, {id(memo[id(one)]): (one, memo[id(one)]) for one in memo.get(id(memo), ()) if id(one) in memo}


def _copied(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deep copy of the model. Modules with their own way to copy themselves are copied attribute by attribute, if that
    works: their own way may fail, make other parameters, or draw random numbers."""
    held = reachable([model], lambda one: isinstance(one, (*CONTAINERS, partial, nn.Module)))
    own = [one for one in held if isinstance(one, nn.Module) and _copies_itself(type(one))]
    if not own:
        return copy_module(model, memo)
    tried = memo | {id(module): object.__new__(type(module)) for module in own}
    with contextlib.suppress(Exception):
        for module in own:
            vars(tried[id(module)]).update({name: copy.deepcopy(one, tried) for name, one in vars(module).items()})
        clone = copy_module(model, tried)
        kept = [*own, *tried.pop(id(tried), ())]
        memo |= {**tried, id(memo): kept}
        return clone
    return copy_module(model, memo)


def _copies_itself(kind: type) -> bool:
    owners = (next((each for each in kind.__mro__ if name in vars(each)), object) for name in _COPYING)
    return any(
        one.__module__.partition(".")[0] not in ("torch", "builtins") or one.__module__.startswith("torch.fx.")
        for one in owners
    )


def _closures(model: nn.Module, held: Set[int]) -> list[tuple[FunctionType, FunctionType]]:
    """Functions in attributes of the model's modules that close over an object in ``held`` (ids), a method of one, or
    another such function. Each comes with a copy that has its own, empty cells for these; ``_fill`` fills them.
    ``copy.deepcopy`` does not copy functions."""
    values = (value for module in model.modules() for value in vars(module).values())
    functions = functions_in(values, lambda one: isinstance(one, (*CONTAINERS, *_BOUND)))
    over = [(one, _ids(closed_over(one))) for one in functions]
    copied: dict[int, FunctionType] = {}
    while more := [
        one for one, contents in over if id(one) not in copied and not contents.isdisjoint(held | copied.keys())
    ]:
        copied |= {id(one): one for one in more}
    taken = held | copied.keys()
    cells = [
        cell
        for one in copied.values()
        for cell in one.__closure__ or ()
        if not _ids([cell_value(cell)]).isdisjoint(taken)
    ]
    own = {id(cell): CellType() for cell in cells}
    return [(one, _with_cells(one, own)) for one in copied.values()]


def _ids(values: Iterable[Any]) -> set[int]:
    """The ids of the values and of what they are bound to."""
    return {*map(id, reachable(values, lambda one: isinstance(one, (*_BOUND, tuple, dict))))}


def _with_cells(function: FunctionType, cells: Mapping[int, CellType]) -> FunctionType:
    closure = tuple(cells.get(id(cell), cell) for cell in function.__closure__ or ())
    copied = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, closure or None
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    copied.__dict__.update(function.__dict__)
    return copied


def _fill(function: FunctionType, copied: FunctionType, memo: dict[int, Any]) -> None:
    """Fill the cells of ``copied`` with copies of what ``function`` closes over."""
    for cell, own in zip(function.__closure__ or (), copied.__closure__ or (), strict=True):
        if own is not cell:
            own.cell_contents = _of_copy(cell.cell_contents, memo)
    if function.__defaults__ is not None:
        copied.__defaults__ = tuple(_of_copy(default, memo) for default in function.__defaults__)
    if function.__kwdefaults__ is not None:
        copied.__kwdefaults__ = {name: _of_copy(default, memo) for name, default in function.__kwdefaults__.items()}


def _of_copy(value: Any, memo: dict[int, Any]) -> Any:
    """The counterpart in the copy of a part of the model, of a copied function, or of something bound to these."""
    if isinstance(value, MethodType):
        return MethodType(_of_copy(value.__func__, memo), _of_copy(value.__self__, memo))
    if type(value) is partial:
        named = {name: _of_copy(one, memo) for name, one in value.keywords.items()}
        return partial(_of_copy(value.func, memo), *(_of_copy(one, memo) for one in value.args), **named)
    if type(value) is tuple:
        return tuple(_of_copy(one, memo) for one in value)
    return memo.get(id(value), value)


def planned_forward(model: nn.Module) -> Any:
    """The planned ``forward`` of a model, also below wrappers of mixed precision; ``None`` without one."""
    forward: Any = model.__dict__.get("forward")
    while forward is not None and not getattr(forward, "_lowtide_runtime", False):
        forward = getattr(forward, "__func__", None) or getattr(forward, "__wrapped__", None)
    return forward
