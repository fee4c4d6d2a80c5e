"""A call captured once for many shapes: its program with symbolic sizes, and the programs for given sizes.

``capture_family`` traces a call in which some sizes are symbols (``trace.sizes``). ``SymbolicFamily.member`` gives what
a capture of a call with other sizes would give, as long as the program's questions about sizes have the same answers.
It does not trace; it only puts in numbers. Whoever makes a family compares a member with a capture of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import nn

from lowtide.capture.arguments import flat_arguments
from lowtide.capture.capture import capture
from lowtide.capture.contract import Captured
from lowtide.capture.known import Known
from lowtide.capture.model_state import model_state
from lowtide.capture.python_state.effects.held_inputs import HeldInputs
from lowtide.capture.rehearsal import Effects
from lowtide.capture.trace.questions import Provenance, Question
from lowtide.capture.trace.sizes import SYMBOLIC, Place, Shapes, SymbolicSizes, compiled, expression, extents, values_of
from lowtide.errors import CaptureError
from lowtide.ir import Value
from lowtide.objects.walk import parts_of
from lowtide.program import Call, Program, TensorMeta
from lowtide.program.references import map_leaves
from lowtide.program.results import GradientMask


def capture_family(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    varying: Collection[Place],
    *,
    apart: bool = False,
    mask: GradientMask | None = None,
    known: Known | None = None,
    rewrite: Callable[[torch.fx.GraphModule], None] | None = None,
    like: Captured | None = None,
) -> SymbolicFamily:
    """Capture the calls like ``model(*args, **kwargs)`` whose tensors have other sizes at the places ``varying``.

    ``apart``: sizes that are equal in this call may differ in others. ``like``: a capture of one of the calls. Raises
    ``CaptureError`` if the call cannot be captured with symbolic sizes; alone it may still be.
    """
    sizes = SymbolicSizes(varying, apart)
    captured = capture(model, args, kwargs, mask=mask, rewrite=rewrite, known=known, sizes=sizes, like=like)
    return SymbolicFamily(captured, sizes, flat_arguments(args, kwargs, model_state(model).tensors)[0])


class SymbolicFamily:
    """The programs of one call for many sizes. ``is_fixed``: whether the answers to questions about sizes allow no
    other numbers."""

    def __init__(self, captured: Captured, sizes: SymbolicSizes, tensors: Sequence[torch.Tensor]) -> None:
        contract, program = captured.contract, captured.program
        if contract.effects != Effects() or contract.settings or contract.buffers or contract.conditions.draws:
            raise CaptureError(
                "the call leaves something in the model, or draws numbers from Python's generators or NumPy's"
            )
        if any(isinstance(part, SYMBOLIC) for part in parts_of((contract.result_structure, program.mask))):
            raise CaptureError("what the call returns beside tensors depends on sizes")
        if any(not _is_fixed(program.metas[value]) for value in program.constants):
            raise CaptureError("a constant of the program has a size that varies")
        self.is_fixed = sizes.are_fixed()
        self.expressions = dict(sizes.expressions)
        self._shapes = [*map(extents, tensors)]
        self._numbers: dict[sympy.Expr, int] = {}
        rows = {n: expression(one.answer[0]) for n, one in enumerate(_of_values(captured)) if one.ask == "shape"}
        self._selected = {number: one for number, one in rows.items() if one.is_Symbol}
        self._captured = _mapped(captured, lambda value: map_leaves(value, SYMBOLIC, self._number))
        self._traced = dict(sizes.traced)
        self._symbols = sorted(self._traced, key=str)
        conditions = sizes.conditions()
        for one in (*conditions, *self._numbers):
            if not one.free_symbols <= set(self._symbols):
                raise CaptureError(f"sizes depend on {one}, which no size of an argument tells")
        self._hold = compiled(conditions, self._symbols)
        self._values = compiled(self._numbers, self._symbols)

    @property
    def mask(self) -> GradientMask:
        """How gradients arrive in calls of the family."""
        return self._captured.program.mask

    @property
    def held_inputs(self) -> HeldInputs:
        """The inputs that are in attributes."""
        return self._captured.contract.conditions.held_inputs

    def member(self, shapes: Shapes, answer: Callable[[int, Question], Any]) -> Captured | None:
        """The capture of a call with tensors of these shapes; ``None`` if its program is another one. ``answer``:
        returns the answer that a question about values, given by its number, has in the call."""
        known = values_of(shapes, self.expressions)
        if known is None or not self._vary_as_known(shapes):
            return None
        values = self._traced | known
        questions = _of_values(self._captured)
        for number, symbol in self._selected.items():
            found = answer(number, _mapped_question(questions[number], self._put(values), {}))
            values[symbol] = found[0] if found else 0
        if not all(self._hold(*(values[symbol] for symbol in self._symbols))):
            return None
        return _mapped(self._captured, self._put(values))

    def _put(self, values: Mapping[sympy.Symbol, int]) -> Callable[[Any], Any]:
        """A function that replaces sizes by numbers, for these values of the symbols."""
        values_at = self._values(*(values[symbol] for symbol in self._symbols))
        return lambda value: map_leaves(value, _Size, lambda size: values_at[size.index])

    def confirmed_by(self, captured: Captured, shapes: Shapes) -> bool | None:
        """Whether the member for these shapes equals a capture of such a call. ``None`` if the call is not a member, or
        if other answers led to another program."""
        asked = _of_values(captured)
        member = self.member(shapes, lambda number, _: asked[number].answer if number < len(asked) else ())
        if member is None or not _asked_the_same(member, captured):
            return None
        same = member.program.same_as(captured.program, frozenset())
        return same and member.contract.same_as(captured.contract)

    def _vary_as_known(self, shapes: Shapes) -> bool:
        """Whether the sizes differ only at the places that vary."""
        return all(
            size == known or (number, dim) in self.expressions
            for number, (new, old) in enumerate(zip(shapes, self._shapes, strict=True))
            for dim, (size, known) in enumerate(zip(new, old, strict=True))
        )

    def _number(self, value: Any) -> Any:
        found = expression(value)
        if found.is_number:
            return type(value.node.hint)(found)
        return _Size(self._numbers.setdefault(found, len(self._numbers)))


@dataclasses.dataclass(frozen=True, slots=True)
class _Size:
    """Stands for a size that varies. Holds its place among the family's sizes."""

    index: int


def _is_fixed(meta: TensorMeta) -> bool:
    numbers = (*meta.shape, *meta.stride, meta.storage_offset, meta.storage_bytes)
    return not any(isinstance(number, (_Size, *SYMBOLIC)) for number in numbers)


def _of_values(captured: Captured) -> list[Question]:
    """The questions about values of inputs. Questions about sizes alone do not exist where sizes are numbers."""
    return [one for one in captured.contract.conditions.questions if one.known.positions()]


def _asked_the_same(member: Captured, captured: Captured) -> bool:
    """Whether both programs follow from the same answers, and from the same comparisons of numbers."""
    compared = [
        {place: read.value.answers for place, read in each.contract.conditions.compared().items()}
        for each in (member, captured)
    ]
    alone = [one for one in member.contract.conditions.questions if not one.known.positions()]
    answers = [[(one.ask, one.source, one.answer) for one in _of_values(each)] for each in (member, captured)]
    return answers[0] == answers[1] and compared[0] == compared[1] and all(one.holds([], {}) for one in alone)


def _mapped(captured: Captured, put: Callable[[Any], Any]) -> Captured:
    """``captured`` with ``put`` applied to the sizes in its program and in the subjects of its questions."""
    conditions, done = captured.contract.conditions, dict[int, Provenance]()
    questions = tuple(_mapped_question(one, put, done) for one in conditions.questions)
    contract = dataclasses.replace(captured.contract, conditions=dataclasses.replace(conditions, questions=questions))
    return Captured(_mapped_program(captured.program, put), contract)


def _mapped_question(one: Question, put: Callable[[Any], Any], done: dict[int, Provenance]) -> Question:
    return dataclasses.replace(one, known=_mapped_provenance(one.known, put, done), answer=put(one.answer))


def _mapped_provenance(known: Provenance, put: Callable[[Any], Any], done: dict[int, Provenance]) -> Provenance:
    if id(known) not in done:
        args, kwargs = map_leaves(
            put((known.args, known.kwargs)), Provenance, lambda leaf: _mapped_provenance(leaf, put, done)
        )
        done[id(known)] = dataclasses.replace(known, args=args, kwargs=kwargs)
    return done[id(known)]


def _mapped_program(program: Program, put: Callable[[Any], Any]) -> Program:
    def of_meta(meta: TensorMeta) -> TensorMeta:
        if _is_fixed(meta):
            return meta
        shape, stride, offset, nbytes = put((meta.shape, meta.stride, meta.storage_offset, meta.storage_bytes))
        return TensorMeta(shape, stride, meta.dtype, meta.device, offset, nbytes)

    def of_call(call: Call) -> Call:
        args, kwargs = put((call.args, call.kwargs))
        return Call(call.target, args, kwargs, call.positions)

    metas = tuple(map(of_meta, program.metas))
    values = tuple(
        Value(value.id, value.name, value.storage, value.producer, value.dtype, meta.shape)
        for value, meta in zip(program.graph.values, metas, strict=True)
    )
    views = [None if one.view is None else _of_view(one.view, put) for one in program.results]
    return dataclasses.replace(
        program,
        graph=dataclasses.replace(program.graph, values=values),
        metas=metas,
        calls=tuple(map(of_call, program.calls)),
        results=tuple(dataclasses.replace(one, view=view) for one, view in zip(program.results, views, strict=True)),
    )


def _of_view(view: Any, put: Callable[[Any], Any]) -> Any:
    shape, stride, offset = put((view.shape, view.stride, view.offset))
    return dataclasses.replace(view, shape=shape, stride=stride, offset=offset)
