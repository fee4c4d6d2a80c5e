"""Numbers that Python code reads from tensors that the forward pass has computed: ``x.abs().max().item()``.

Their values are unknown while the model is traced, and differ in each call. In the program, each is a tensor of one
element. What Python computes from the number is computed again in each call, if the call returns it, leaves it in an
attribute, or an operator takes it (``program.items``). Comparisons and combinations with other numbers become tensor
operations that are as exact as Python's. If code does more with such a number, the model cannot be one program.
"""

from __future__ import annotations

import math
import operator
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from lowtide.capture.positions import is_whole, with_places
from lowtide.capture.python_state.guards.compared import Comparisons, StandIn, kind_of
from lowtide.capture.python_state.guards.shown import at_least, at_most
from lowtide.capture.taken_numbers import TakingNumbers
from lowtide.capture.trace.classes import fake_of
from lowtide.capture.trace.expected import READ, expect, is_drawn
from lowtide.capture.trace.selected import Selected
from lowtide.program.items import TensorNumber
from lowtide.program.scalars import NUMBERS, Operation, Taken

Variables = dict[str, Any]  # of a module
# The first values of stand-ins. No operator takes such numbers by itself.
_FIRST, _BETWEEN = 0.7548776662466927, 0.0317249
_FIRST_WHOLE, _BETWEEN_WHOLE = 7_000_003, 20_011
_MOST = 64  # numbers per call, each of which is an operator; long lists are not meant for computing
_EXACT = {operator.add, operator.sub, operator.mul, operator.truediv, operator.neg, abs}  # on tensors as on numbers
_EXACT_OF_WHOLE = {operator.mod, operator.floordiv}  # by a positive one


class TensorNumbers:
    """The numbers of one trace.

    ``allowed``: whether numbers may be read at all. ``taken``: what operators took of all numbers; ``None`` if they may
    take none that come from tensors. ``moved``: whether operators are given other numbers. ``converting``: variables of
    modules whose code may convert numbers (``float``, ``int``); ``asking``: those of another module whose code would.
    ``clocks``: whether numbers may come from clocks; ``clocked``: whether some did.
    """

    def __init__(
        self,
        allowed: bool,
        taken: list[Taken] | None,
        moved: bool,
        converting: Sequence[Variables],
        clocks: bool = False,
    ) -> None:
        self.allowed, self.moved, self.converting = allowed, moved, converting
        self.clocks, self.clocked = clocks, False
        self.asking: Variables | None = None
        self._taken = taken
        self._read: list[Comparisons] = []
        # By the ids of tensors' values; a tensor gets a new value when it is written.
        self._places: dict[int, tuple[torch.Tensor, StandIn | None]] = {}
        self._sums: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]] = {}  # of a tensor and a number

    def begin(self) -> None:
        """Begin a run of the model, or end the last one: its numbers are not used any more."""
        self._read.clear()
        self._places.clear()
        self._sums.clear()

    def __bool__(self) -> bool:
        return bool(self._read)

    @property
    def misused(self) -> bool:
        """Whether the last run did more with a number than can be followed."""
        return any(one.used_otherwise for one in self._read)

    def indexing(self, function: Callable[..., Any], args: Sequence[Any]) -> Sequence[Any]:
        """The arguments of a call, with stand-ins in place of tensors of one whole number if the call uses these as
        indices: PyTorch reads their values."""
        return with_places(function, args, self._place)

    def _place(self, tensor: torch.Tensor) -> StandIn | None:
        value = _value(tensor)
        if id(value) not in self._places:
            _, of, before, number = self._sums.get(id(value), (None, None, None, 0))
            begin = None if of is None or _value(of) is not before else self._place(of)
            made: Any = self.item(tensor) if begin is None else operator.add(begin, number)
            self._places[id(value)] = value, made
        return self._places[id(value)][1]

    def note_sum(self, function: Callable[..., Any], args: Sequence[Any], result: Any) -> None:
        """Record that a call may have moved a position by a Python number."""
        if function not in _ADDING or [type(one) for one in args[1:]] != [int] or not isinstance(args[0], torch.Tensor):
            return
        if is_whole(result) and result.dtype is args[0].dtype is torch.int64:
            value = _value(result)
            self._sums[id(value)] = value, args[0], _value(args[0]), args[1]

    def convert(self, tensor: Any, calling: types.FrameType) -> None:
        """Code asks for the number of a traced tensor itself."""
        if self.allowed and _is_unknown(tensor):
            self.converted(calling)

    def converted(self, calling: types.FrameType) -> None:
        """Code converts the stand-in of a number."""
        if not any(calling.f_globals is one for one in self.converting):
            self.asking = self.asking or calling.f_globals

    def item(self, tensor: Any) -> StandIn | None:
        """The stand-in for the number of a traced tensor. ``None`` if its value is known, it is not a number, or there
        are too many."""
        if not self.allowed or not _is_unknown(tensor) or self._are_too_many():
            return None
        return self._of(tensor)

    def clock(self, ask: Callable[[], torch.Tensor]) -> StandIn | None:
        """The stand-in for the time that a clock tells; ``None`` if the real time is to be used."""
        if not (self.allowed and self.clocks) or self._are_too_many():
            return None
        self.clocked = True
        return self._of(ask())

    def _are_too_many(self) -> bool:
        if len(self._read) < _MOST:
            return False
        self._read[0].used_otherwise = True
        return True

    def _of(self, tensor: torch.Tensor) -> StandIn:
        place = len(self._read)
        whole = not tensor.dtype.is_floating_point
        number = None if self._taken is None else TensorNumber(place)
        made = Comparisons(int if whole else float, number=number, moved=self.moved, join=self._joined)
        made.convert = self.converted
        made.taken = [] if self._taken is None else self._taken
        self._read.append(made)
        with torch.no_grad():
            made.tensor = READ(tensor.detach(), place)
        value = _FIRST_WHOLE + place * _BETWEEN_WHOLE if whole else _FIRST + place * _BETWEEN
        stand_in: StandIn = made.stand_in(value)
        return stand_in

    def _joined(self, function: Callable[..., Any], one: Any, other: Any) -> Any:
        """The result of a function of one or two numbers, at least one of them from a tensor: a truth value, or another
        number of a tensor."""
        with torch.no_grad():
            made = _made(function, one, other)
            if made.dtype is not torch.bool:
                return self._of(made)
            drawn = any(is_drawn(each.comparisons.tensor) for each in (one, other) if _is_of_tensor(each))
            if function in _INSIDE or not drawn:
                expect(made, function in _USUALLY)
            return bool(made)


class ReadingNumbers(TakingNumbers):
    """A mode in which tensors can be indexed by ``numbers`` of other tensors, and which records sums of these."""

    def __init__(self, numbers: TensorNumbers) -> None:
        super().__init__()
        self.numbers = numbers

    def run(self, func: Any, args: Any, kwargs: Any, calling: types.FrameType) -> Any:
        made = super().run(func, self.numbers.indexing(func, args), kwargs, calling)
        if not kwargs and not isinstance(made, Selected):
            self.numbers.note_sum(func, args, made)
        return made


def _value(tensor: torch.Tensor) -> torch.Tensor:
    """The present fake tensor of a traced one."""
    if isinstance(tensor, FunctionalTensor):
        torch._sync(tensor)  # type: ignore[attr-defined, no-untyped-call]
    return fake_of(tensor)  # type: ignore[no-any-return]


def _is_unknown(tensor: Any) -> bool:
    if not isinstance(tensor, (FunctionalTensor, FakeTensor)) or tensor.layout is not torch.strided:
        return False
    if tensor.numel() != 1 or tensor.dtype is torch.bool or tensor.dtype.is_complex:
        return False
    return not hasattr(fake_of(tensor), "_lowtide_known")


def _is_of_tensor(one: Any) -> bool:
    return type(one) is StandIn and one.comparisons.tensor is not None


_INSIDE = {at_least, at_most}
_ADDING = {torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__}
_COMPARING = {operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne, *_INSIDE}
_USUALLY = {operator.ne, math.isfinite, *_INSIDE}  # true
_ASKING = {math.isnan: torch.isnan, math.isinf: torch.isinf, math.isfinite: torch.isfinite}


def _made(function: Callable[..., Any], one: Any, other: Any) -> torch.Tensor:
    """The result of a function of numbers, or of tensors that they come from."""
    made: torch.Tensor
    if function in _ASKING and other is None:
        made = _ASKING[function](_as_tensor(one, floats=True))
        return made
    other = float(other) if type(other) is np.float64 and function in _COMPARING else other
    known = type(other) is StandIn or type(other) in (*NUMBERS, bool)
    if not known or (function not in _EXACT and function not in _COMPARING):
        raise one.misused()
    floats = function is operator.truediv or any(kind_of(each) is float for each in (one, other))
    operands = _as_tensor(one, floats), _as_tensor(other, floats)
    if function is operator.truediv:
        _refuse_zero(operands[1])
    made = function(*operands)
    return made


def _refuse_zero(divisor: Any) -> None:
    """Raise ``ZeroDivisionError`` as Python does, where tensors would become infinite."""
    if isinstance(divisor, torch.Tensor):
        other = divisor != 0
        expect(other, True)
        if not other:
            raise ZeroDivisionError("float division by zero")


def _as_tensor(one: Any, floats: bool) -> Any:
    """A number of a tensor in the precision of Python's numbers; other numbers unchanged."""
    if not _is_of_tensor(one):
        return one
    made_floats = one.comparisons.kind is float or any(map(_makes_floats, one.operations))
    if not all(_is_exact(operation, made_floats) for operation in one.operations):
        raise one.misused()
    tensor = one.comparisons.tensor.double() if made_floats else one.comparisons.tensor.long()
    for operation in one.operations:
        if operation.function is operator.truediv and operation.reflected:
            _refuse_zero(tensor)
        tensor = operation(tensor)
    return tensor.double() if floats else tensor


def _is_exact(operation: Operation, floats: bool) -> bool:
    """Whether an operation gives the same on tensors as on Python's numbers."""
    whole = not floats and not operation.reflected and type(operation.other) is int and operation.other > 0
    return operation.function in _EXACT or (whole and operation.function in _EXACT_OF_WHOLE)


def _makes_floats(operation: Operation) -> bool:
    return operation.function is operator.truediv or type(operation.other) is float
