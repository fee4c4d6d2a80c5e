"""A call captured once for many shapes: its program with symbolic sizes, and the programs at given ones.

``capture_family`` traces a call whose sizes at some places are symbols (``trace.sizes``). ``Family.member`` is what a capture
of a call with other sizes would give, wherever what the program asked about its sizes has the same answers there: no tracing,
just numbers put in. Whoever makes a family compares such a member with a capture of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import nn

from lowtide.capture.capture import Known, capture, flat_arguments
from lowtide.capture.contract import Captured
from lowtide.capture.rehearsal import Effects
from lowtide.capture.trace.questions import Provenance, Question
from lowtide.capture.trace.sizes import SYMBOLIC, Place, Shapes, SymbolicSizes, compiled, expression, hints, values_of
from lowtide.errors import CaptureError
from lowtide.ir import Value
from lowtide.program import Call, Program, TensorMeta
from lowtide.program.objects import parts_of
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
) -> Family:
    """The calls like ``model(*args, **kwargs)`` whose tensors differ in their sizes at the places ``varying``.

    ``apart``: sizes that are equal in this call need not be so in others. Raises ``CaptureError`` where the call cannot be
    captured with symbolic sizes; by itself it may be.
    """
    sizes = SymbolicSizes(varying, apart)
    captured = capture(model, args, kwargs, mask=mask, known=known, sizes=sizes)
    return Family(captured, sizes, flat_arguments(args, kwargs)[0])


class Family:
    """The programs of one call at many sizes."""

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
        self.captured = captured
        self.expressions = dict(sizes.expressions)
        self._shapes = [hints(tensor.shape) for tensor in tensors]
        self._numbers: dict[sympy.Expr, int] = {}
        self.program = self._in_numbers(program)
        self._symbols = sorted({s for one in self.expressions.values() for s in one.free_symbols}, key=str)
        conditions = sizes.conditions()
        for one in (*conditions, *self._numbers):
            if not one.free_symbols <= set(self._symbols):
                raise CaptureError(f"sizes depend on {one}, which no size of an argument tells")
        self._hold = compiled(conditions, self._symbols)
        self._values = compiled(self._numbers, self._symbols)

    def member(self, shapes: Shapes) -> Captured | None:
        """The capture of a call with tensors of these shapes; ``None`` where that makes for another program."""
        values = values_of(shapes, self.expressions)
        if values is None or not self._vary_as_known(shapes):
            return None
        sizes = [values[symbol] for symbol in self._symbols]
        if not all(self._hold(*sizes)):
            return None
        return self._with(self._values(*sizes))

    def confirmed_by(self, captured: Captured, shapes: Shapes) -> bool | None:
        """Whether the member of these shapes is what a capture of such a call gave; ``None`` where that call is no member, or
        other answers made for another program."""
        member = self.member(shapes)
        if member is None or not _asked_the_same(member, captured):
            return None
        same = _nameless(member.program).same_as(_nameless(captured.program), frozenset())
        return same and member.contract.same_as(captured.contract)

    def _vary_as_known(self, shapes: Shapes) -> bool:
        """Whether sizes differ at the places alone that vary."""
        return all(
            size == known or (number, dim) in self.expressions
            for number, (new, old) in enumerate(zip(shapes, self._shapes, strict=True))
            for dim, (size, known) in enumerate(zip(new, old, strict=True))
        )

    def _in_numbers(self, program: Program) -> Program:
        """``program`` with a ``_Number`` for every symbolic size."""
        return _mapped(program, lambda value: map_leaves(value, SYMBOLIC, self._number))

    def _number(self, value: Any) -> Any:
        found = expression(value)
        if found.is_number:
            return type(value.node.hint)(found)
        return _Number(self._numbers.setdefault(found, len(self._numbers)))

    def _with(self, values: Sequence[Any]) -> Captured:
        def put(value: Any) -> Any:
            return map_leaves(value, _Number, lambda number: values[number.index])

        contract = self.captured.contract
        known: dict[int, Provenance] = {}
        questions = tuple(
            dataclasses.replace(one, known=self._provenance(one.known, values, known))
            for one in contract.conditions.questions
            if isinstance(one, Question)
        )
        conditions = dataclasses.replace(contract.conditions, questions=questions)
        return Captured(_mapped(self.program, put), dataclasses.replace(contract, conditions=conditions))

    def _provenance(self, known: Provenance, values: Sequence[Any], done: dict[int, Provenance]) -> Provenance:
        """How a known tensor is computed at these sizes."""
        if id(known) not in done:

            def at(leaf: Any) -> Any:
                if isinstance(leaf, Provenance):
                    return self._provenance(leaf, values, done)
                number = self._number(leaf)
                return values[number.index] if isinstance(number, _Number) else number

            args, kwargs = map_leaves((known.args, known.kwargs), (Provenance, *SYMBOLIC), at)
            done[id(known)] = dataclasses.replace(known, args=args, kwargs=kwargs)
        return done[id(known)]


@dataclasses.dataclass(frozen=True, slots=True)
class _Number:
    """Stands for a size that varies: its place among the family's."""

    index: int


def _is_fixed(meta: TensorMeta) -> bool:
    numbers = (*meta.shape, *meta.stride, meta.storage_offset, meta.storage_bytes)
    return not any(isinstance(number, (_Number, *SYMBOLIC)) for number in numbers)


def _asked_the_same(member: Captured, captured: Captured) -> bool:
    """Whether both programs follow from the same answers. Those about sizes alone are no questions where sizes are numbers."""
    answers = [], []  # type: tuple[list[Any], list[Any]]
    for found, one in zip(answers, (member, captured), strict=True):
        for question in one.contract.conditions.questions:
            if question.known.positions():
                found.append((question.ask, question.source, question.answer))
            elif not question.holds([], {}):
                return False
    return answers[0] == answers[1]


def _nameless(program: Program) -> Program:
    """Without the names that the tracer counted out: it counts symbolic sizes, too."""
    graph = program.graph
    values = tuple(dataclasses.replace(value, name="") for value in graph.values)
    ops = tuple(dataclasses.replace(op, name="") for op in graph.ops)
    return dataclasses.replace(program, graph=dataclasses.replace(graph, values=values, ops=ops))


def _mapped(program: Program, put: Callable[[Any], Any]) -> Program:
    """``program`` with ``put(number)`` for every number of a size."""

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
