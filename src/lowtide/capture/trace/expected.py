"""Values that a model checks in its forward pass: ``if not torch.isfinite(x).all()``, an ``assert``, the arguments of a
loss.

They come from floating-point numbers, so their values are unknown during capture. But checks have an answer that they
nearly always get: ``all`` is true, ``any`` is false, and compared tensors of one shape are equal. A number that the
model keeps in a buffer (a flag that says "initialized", say) is compared with its present value. If the least of some
numbers is above a bound, this is a statement about all of them, and if it is below, about any (``torch.istft`` asks
that about its windows).

The program is captured with the expected answer. An operator in it looks at the value in each call. If the answer is
another one, it ends the forward pass before anything was written, so that the call can run by another program.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from lowtide.capture.trace.classes import fake_of
from lowtide.program.foreign import CHECKS
from lowtide.program.source import user_source

_ATEN = torch.ops.aten
_EXPECTED = {
    **dict.fromkeys((_ATEN.all.default, _ATEN.all.dim, _ATEN.all.dims), True),
    **dict.fromkeys(
        (_ATEN.any.default, _ATEN.any.dim, _ATEN.any.dims, _ATEN.isnan.default, _ATEN.isinf.default), False
    ),
}
Answers = tuple[bool | None, ...]  # to the first checks of a call; None for an unknown one
_LEAST = {_ATEN.min.default, _ATEN.amin.default}
_MOST = {_ATEN.max.default, _ATEN.amax.default}
_BELOW = {_ATEN.lt.Scalar, _ATEN.le.Scalar}
_ABOVE = {_ATEN.gt.Scalar, _ATEN.ge.Scalar}
_AROUND_ZERO = {_ATEN.gt.Scalar, _ATEN.le.Scalar}
_COMPARED = {
    _ATEN.lt.Scalar: operator.lt,
    _ATEN.le.Scalar: operator.le,
    _ATEN.gt.Scalar: operator.gt,
    _ATEN.ge.Scalar: operator.ge,
    _ATEN.eq.Scalar: operator.eq,
    _ATEN.ne.Scalar: operator.ne,
}
_NOT = {_ATEN.logical_not.default, _ATEN.bitwise_not.default}
_AND = {_ATEN.logical_and.default, _ATEN.bitwise_and.Tensor}
_OR = {_ATEN.logical_or.default, _ATEN.bitwise_or.Tensor}
_SAME = {_ATEN.alias.default, _ATEN.view.default, _ATEN.squeeze.default, _ATEN.detach.default}

_LIBRARY = torch.library.Library(CHECKS, "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("expect(Tensor value, bool answer, int number) -> ()")  # type: ignore[no-untyped-call]
torch.library.register_fake(f"{CHECKS}::expect", lambda value, answer, number: None, lib=_LIBRARY)
EXPECT = torch.ops.lowtide_checks.expect.default
_LIBRARY.define("read(Tensor value, int number) -> Tensor")  # type: ignore[no-untyped-call]
torch.library.register_fake(
    f"{CHECKS}::read", lambda value, number: torch.empty((), dtype=value.dtype, device=value.device), lib=_LIBRARY
)
READ = torch.ops.lowtide_checks.read.default  # reads a number, see ``capture.read_numbers``
torch.fx.node.has_side_effect(EXPECT)
torch.fx.node.has_side_effect(READ)

_SAME_NUMBERS = {*_SAME, READ, _ATEN._to_copy.default}
_SAME_ELEMENTS = {*_SAME_NUMBERS, _ATEN.select.int, _ATEN.slice.Tensor, _ATEN.unsqueeze.default}
QUESTIONS = {_ATEN._local_scalar_dense.default, _ATEN.equal.default}
COMPARISONS: dict[Any, Callable[..., torch.Tensor]] = {
    _ATEN.allclose.default: torch.isclose,
    _ATEN.equal.default: torch.eq,
}


class Expectations:
    """The expected answers to checks, in the order in which a run of the model asks.

    ``known``: the first answers, as they were in an earlier call; ``None`` if no answers may be expected. An answer of
    ``None`` in it stands for one that the earlier call did not get to. It is guessed from an earlier check in the same
    line: the one before which the most previous answers were the same. In a loop over steps or layers, this is the
    check of the step or layer before. The number of such guesses is limited, so that a loop that runs while something
    holds is not traced for ever.
    """

    def __init__(self, known: Sequence[bool | None] | None) -> None:
        self._known = known
        self.begin()

    def begin(self) -> None:
        self.answers: list[bool] = []
        self._lines: list[str] = []  # the source lines of the checks
        self._alike: list[int] = []  # before each of them, and the same as before the next one

    def next_answer(self, value: Any) -> bool | None:
        """The expected answer for a traced value; ``None`` if unknown."""
        usual = getattr(value, "_lowtide_expected", None)
        if usual is None or self._known is None or value.numel() != 1:
            return None
        number = len(self.answers)
        if number >= len(self._known):
            self.answers.append(usual)
            return self.answers[-1]
        known, line = self._known[number], user_source()
        if known is None:
            there = [one for one in range(number) if self._lines[one] == line][1:]
            known = self.answers[max(there, key=lambda one: (self._alike[one], one))] if there else usual
        asked = zip(self._lines, self.answers, self._alike, strict=True)
        self._alike = [0, *(alike + 1 if (at, answer) == (line, known) else 0 for at, answer, alike in asked)]
        self._lines.append(line)
        self.answers.append(known)
        return known


def note_expected(func: Any, args: Sequence[Any], result: Any) -> None:
    """Record on the result of an operator its usual value, if there is one."""
    if func in _LEAST or func in _MOST:
        result._lowtide_least = func in _LEAST  # whether it is the least or the greatest of some numbers
    if func in _SAME_NUMBERS and hasattr(args[0], "_lowtide_least"):
        result._lowtide_least = args[0]._lowtide_least
    if func is _ATEN.new_ones.default:
        result._lowtide_ones = True  # PyTorch's functions compare with such tensors
    if not isinstance(result, FakeTensor):
        return
    if isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable and isinstance(args[0], torch.Tensor):
        vars(args[0]).pop("_lowtide_now", None)
    now = getattr(args[0], "_lowtide_now", None) if args else None
    if now is not None and func in _SAME:
        result._lowtide_now = now  # type: ignore[attr-defined]
    if torch.Tag.nondeterministic_seeded in func.tags or (func in _SAME_ELEMENTS and is_drawn(args[0])):
        result._lowtide_drawn = True  # type: ignore[attr-defined]
    if result.dtype is not torch.bool:
        return
    usual = _EXPECTED.get(func)
    if usual is not None or (func is _ATEN.eq.Tensor and hasattr(args[1], "_lowtide_ones")):
        usual = getattr(args[0], "_lowtide_expected", usual)
    if (func in _BELOW or func in _ABOVE) and hasattr(args[0], "_lowtide_least"):
        usual = (func in _ABOVE) == args[0]._lowtide_least
    if func in _AROUND_ZERO and getattr(args[0], "_lowtide_uniform", False) and args[1] == 0:
        usual = func in _ABOVE  # of as good as all uniform numbers: ``rand(1) > p`` for p = 0
    if now is not None and func in _COMPARED:
        usual = bool(_COMPARED[func](now, args[1]))
    if usual is None and func in _NOT | _AND | _OR | _SAME:
        of = [getattr(one, "_lowtide_expected", None) for one in args if isinstance(one, torch.Tensor)]
        if None not in of:
            usual = not of[0] if func in _NOT else any(of) if func in _OR else all(of)
    if usual is not None:
        result._lowtide_expected = usual  # type: ignore[attr-defined]


def note_flag(fake: Any, now: float) -> None:
    """Record that the tensor is a number of the model's, with the value ``now``."""
    fake._lowtide_now = now


def flag_of(traced: Any) -> float | None:
    """The present value of a number of the model's; ``None`` for other tensors."""
    return getattr(fake_of(traced), "_lowtide_now", None)


def is_drawn(traced: Any) -> bool:
    """Whether the tensor is made of elements of random numbers."""
    return getattr(fake_of(traced), "_lowtide_drawn", False)


def expect(traced: Any, answer: bool) -> None:
    """Expect this truth value of a traced tensor, unless more is known about it."""
    fake = fake_of(traced)
    if not hasattr(fake, "_lowtide_expected"):
        fake._lowtide_expected = answer


def is_uniform(func: Any, args: Sequence[Any], result: torch.Tensor) -> bool:
    """Whether the result of an operator is uniform random numbers below one."""
    same = func in _SAME_NUMBERS and (result.dtype == args[0].dtype or result.dtype is torch.float64)
    return func is _ATEN.rand.default or (same and getattr(args[0], "_lowtide_uniform", False))


def fold_uniform(func: Any, args: Sequence[Any]) -> torch.Tensor | None:
    """The constant result of a comparison such as ``rand() < p`` with p <= 0, or ``rand() > p`` with p >= 1: layers
    dropped with probability 0."""
    if func not in _BELOW and func not in _ABOVE:
        return None
    if not getattr(args[0], "_lowtide_uniform", False) or not isinstance(args[1], (int, float)):
        return None
    below = func in _BELOW
    strict = func in (_ATEN.lt.Scalar, _ATEN.gt.Scalar)
    if args[1] < 0 or (args[1] == 0 and func is _ATEN.lt.Scalar):
        return torch.full(args[0].shape, not below)
    if args[1] >= 1:
        return torch.full(args[0].shape, below)
    if args[1] == 0 and not strict and not below:
        return torch.full(args[0].shape, True)
    return None


def all_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Run one of ``COMPARISONS`` as operators, the last of which is a check."""
    if func is _ATEN.equal.default and args[0].shape != args[1].shape:
        return False
    return bool(_ATEN._local_scalar_dense.default(COMPARISONS[func](*args, **kwargs).all()))


def as_expected(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Answer code that asks for a value with its expected value, and make the program look at it."""
    if func in COMPARISONS and any(isinstance(one, FunctionalTensor) for one in args[:2]):
        with mode:
            return all_of(func, args, kwargs)
    if func in QUESTIONS and isinstance(args[0], FunctionalTensor):
        fake = args[0].from_functional()
        if isinstance(fake, FakeTensor) and not hasattr(fake, "_lowtide_known"):
            expectations: Expectations = fake.fake_mode.expectations  # type: ignore[attr-defined]
            answer = expectations.next_answer(fake)
            if answer is not None:
                with mode:
                    EXPECT(args[0], answer, len(expectations.answers) - 1)
                return answer
    return NotImplemented
