"""Functional twins of foreign operators that write into their arguments.

A captured program is functional. PyTorch can make such an operator functional only if it returns nothing that it wrote
into, and then only as a higher-order operator. So while a model is traced, a call of one is replaced by a call of a
twin registered here. The twin runs the operator on copies of the arguments it writes, and returns the copies after its
results; they are then copied back.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lowtide.errors import CaptureError
from lowtide.program import running_statistics
from lowtide.program.foreign import is_foreign

_LIBRARY = torch.library.Library("lowtide", "FRAGMENT")  # type: ignore[no-untyped-call]
_TWINS: dict[torch._ops.OpOverload, Callable[..., Any]] = {}


def through_twins(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Run foreign operators that write, and norms whose schemas do not mention what they write, under the functional
    ``mode``. Returns ``NotImplemented`` for other operators."""
    if statistics := _statistics(func, args):
        with mode:
            results = [*running_statistics.functional_form(func)(*args)]
            for place in reversed(statistics):
                args[place].copy_(results.pop())
        return tuple(results)
    if not is_foreign(func) or not func._schema.is_mutable or func.namespace == "lowtide":
        return NotImplemented
    written = _written(func, args, kwargs)
    memory = [one.untyped_storage()._cdata for one in written]
    if len({*memory}) < len(memory):
        raise CaptureError(
            f"operator {func} writes into several arguments that share memory, which a plan cannot follow. Pass tensors with "
            "memory of their own, or run the model under lowtide.online."
        )
    with mode:
        results = list(_twin(func)(*args, **kwargs))
        for one in reversed(written):
            one.copy_(results.pop())
    return _returned(func, args, kwargs, results)


def _statistics(func: Any, args: Any) -> tuple[int, ...]:
    """The positions of the running statistics that a norm writes in this call."""
    if getattr(func, "namespace", "") != "aten" or (name := func._schema.name[6:]) not in running_statistics.FUNCTIONAL:
        return ()
    return tuple(place for place in running_statistics.written_positions(name, args) if isinstance(args[place], Tensor))


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that the operator writes into, in the order of its schema."""
    return [
        leaf
        for position, argument in enumerate(func._schema.arguments)
        if argument.is_write
        for leaf in pytree.tree_leaves(_argument(argument, position, args, kwargs))
        if isinstance(leaf, Tensor)
    ]


def _argument(argument: Any, position: int, args: Any, kwargs: Any) -> Any:
    return args[position] if position < len(args) else kwargs.get(argument.name)


def _returned(func: Any, args: Any, kwargs: Any, results: list[Tensor]) -> Any:
    """What the operator returns: new tensors, and arguments that it wrote into."""
    arguments = {
        name: _argument(argument, position, args, kwargs)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None
        for name in argument.alias_info.before_set
    }
    fresh = iter(results)
    found = [
        next(fresh) if one.alias_info is None else arguments[next(iter(one.alias_info.before_set))]
        for one in func._schema.returns
    ]
    return None if not found else found[0] if len(found) == 1 else tuple(found)


def _twin(func: Any) -> Callable[..., Any]:
    """The twin of ``func``: it takes the same arguments, and returns a list of the new results and the written
    copies."""
    if func not in _TWINS:
        schema = func._schema
        if any(one.alias_info is None and str(one.type) != "Tensor" for one in schema.returns):
            raise CaptureError(
                f"operator {func} writes into arguments and returns more than tensors, which a plan cannot follow. Return "
                "tensors, or run the model under lowtide.online."
            )
        name = f"{schema.name.replace('::', '_')}_{schema.overload_name or 'default'}"
        name += f"_{len(_TWINS)}" if hasattr(torch.ops.lowtide, name) else ""

        def functional(*args: Any, **kwargs: Any) -> list[Tensor]:
            return _on_copies(func, args, kwargs)

        _LIBRARY.define(f"{name}({_parameters(schema)}) -> Tensor[]", tags=func.tags)  # type: ignore[no-untyped-call]
        _LIBRARY.impl(name, functional, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"lowtide::{name}", functional, lib=_LIBRARY)
        _TWINS[func] = getattr(torch.ops.lowtide, name).default
    return _TWINS[func]


def _on_copies(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    positions = enumerate(func._schema.arguments)
    names = {one.name: place for place, one in positions if one.is_write}
    args = [_copied(value) if place in names.values() else value for place, value in enumerate(args)]
    kwargs = {name: _copied(value) if name in names else value for name, value in kwargs.items()}
    result = func(*args, **kwargs)
    values = () if result is None else result if isinstance(result, (tuple, list)) else (result,)
    fresh = [value for value, one in zip(values, func._schema.returns, strict=True) if one.alias_info is None]
    return [*fresh, *_written(func, args, kwargs)]


def _copied(value: Any) -> Any:
    """Copies with the same strides, since these decide which kernel runs."""
    return pytree.tree_map_only(
        Tensor,
        lambda one: torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=one.device).copy_(one),
        value,
    )


def _parameters(schema: Any) -> str:
    """The parameters of the schema, without the marks for written ones."""
    parameters, _, _ = str(schema).partition("(")[2].rpartition(") -> ")
    return re.sub(r"Tensor\([^()]*\)", "Tensor", parameters)
