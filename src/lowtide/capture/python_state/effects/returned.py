"""What a traced call returns besides tensors."""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from lowtide.capture.python_state.guards.compared import StandIn
from lowtide.capture.python_state.guards.standing import ComparedNumber, Term
from lowtide.capture.python_state.guards.texts import TEXT_STAND_INS
from lowtide.capture.trace.classes import TRACED
from lowtide.errors import CaptureError
from lowtide.objects import opaque, structure
from lowtide.objects.walk import CLOSED, closed_over, content, functions_in, is_open, reachable


def with_originals(result: Any, copies: Mapping[int, tuple[Any, Any]]) -> Any:
    """The result with the model's own modules in place of those of the traced copy, in objects."""
    held = [one for one in structure.objects(result) if not isinstance(one, (nn.Module, structure.ArgumentSlot))]
    if any(isinstance(one, nn.Module) and id(one) in copies for one in reachable(held, is_open)):
        raise CaptureError(
            "the forward pass returns an object that refers to a module of the model, which would be the one of a trace. "
            "Return tensors, or run the model under lowtide.online."
        )
    lazy = [one for one in held if opaque.is_of_c(type(one)) or isinstance(one, functools.partial)]
    lazy += [value for function in functions_in(held, _may_hold) for value in closed_over(function)]
    variables = reachable(lazy, _may_hold)
    if any(isinstance(one, TRACED) or (isinstance(one, nn.Module) and id(one) in copies) for one in variables):
        raise CaptureError(
            "the forward pass returns a function, a generator or an iterator that holds tensors of the call, or modules of the "
            "model: they would be those of a trace. Return the tensors, or run the model under lowtide.online."
        )
    return structure.replaced(
        result, lambda leaf: copies.get(id(leaf), (leaf,))[0] if isinstance(leaf, nn.Module) else leaf
    )


def with_numbers(result: Any, numbers: Sequence[ComparedNumber]) -> Any:
    """The result in which values that follow from changing ``numbers`` are replaced by what computes them."""
    reads = {id(one.comparisons): one.read for one in numbers}

    def computed(leaf: Any) -> Any:
        read = reads.get(id(leaf.comparisons)) if type(leaf) in (StandIn, *TEXT_STAND_INS) else None
        if read is None:
            return leaf
        term = Term(read, leaf.operations)
        return structure.Computed(term, term)

    return structure.replaced(result, computed)


def _may_hold(value: Any) -> bool:
    held = content(value) is not None and not isinstance(value, CLOSED)
    return held or is_open(value) or isinstance(value, types.MethodType)
