"""Proof that a fused program computes the same as the captured one.

Every value is an expression: an operator applied to expressions, down to inputs, constants and arriving gradients.
Equal expressions get equal numbers. A kernel counts as the operators that it replaces (see ``fusion.kernel``). So if
outputs, gradients and updates have the same numbers in both programs, they are the same operators on the same operands,
in whatever order and however often they run. Random operators and effects are also numbered by their turn, and
overwritten inputs by the number of writes so far.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from lowtide.capture.python_state.paths import named
from lowtide.errors import CompiledMismatchError
from lowtide.fusion.kernel import Kernel
from lowtide.fusion.routines import stands_for
from lowtide.ir import Op
from lowtide.ir.graph import UPDATE_TARGET
from lowtide.program.program import Call, Program, Ref
from lowtide.program.references import map_references


def check_same(program: Program, fused: Program) -> None:
    """Raise ``CompiledMismatchError`` if a result of ``fused`` is not the same expression as in ``program``."""
    numbers: dict[Hashable, int] = {}
    expected, found = (_Expressions(each, numbers).results() for each in (program, fused))
    wrong = [name for name in {**expected, **found} if expected.get(name) != found.get(name)]
    if wrong:
        raise CompiledMismatchError(
            f"with its kernels the program no longer computes {named(wrong)} as captured, so it is not run. Please report "
            'it; compiler="eager" runs the operators.'
        )


class _Operand(NamedTuple):
    """The number of an expression, and how often the program has overwritten it."""

    number: int
    writes: int


class _Expressions:
    """The expressions of one program. ``known[value]``: the number of the value's expression."""

    def __init__(self, program: Program, numbers: dict[Hashable, int]) -> None:
        self.program = program
        self.numbers = numbers
        self.known: dict[int, int] = {}
        self.turns = 0  # random operators and effects so far
        self.written = Counter[int]()  # updates so far, by expression number of the input
        self.updates: list[int] = []

    def results(self) -> dict[str, int]:
        """The expression numbers of everything that leaves the program, by name."""
        program, known = self.program, self.known
        for position, value in enumerate(program.inputs):
            if value is not None:
                known[value] = self._number(("input", position))
        for value, tensor in program.constants.items():
            known[value] = self._number(("constant", id(tensor)))
        for op, call in zip(program.graph.ops, program.calls, strict=True):
            self._read(op, call)
        names = program.state_names
        state = {i: names[i][0] if i < len(names) else f"argument {i - len(names)}" for i, _ in program.gradients}
        return {
            **{f"output {i}": known[value] for i, value in enumerate(program.graph.forward_outputs)},
            **{f"the gradient of {state[i]}": known[value] for i, value in program.gradients},
            **{f"update {i}": number for i, number in enumerate(self.updates)},
        }

    def _read(self, op: Op, call: Call) -> None:
        if isinstance(call.target, Kernel):
            local = {number: self.known[ref.value] for number, ref in enumerate(call.args)}
            for line in call.target.body.lines:
                self._compute(line.call, line.outputs, local)
            self.known.update(zip(op.outputs, (local[number] for number in call.target.body.results), strict=True))
            return
        in_turn = op.random or op.effect
        self.turns += in_turn
        number = self._compute(call, op.outputs, self.known, self.turns if in_turn else 0)
        if op.target == UPDATE_TARGET:
            self.updates.append(number)
            self.written[self.known[op.inputs[0]]] += 1

    def _compute(self, call: Call, outputs: Sequence[int], known: dict[int, int], turn: int = 0) -> int:
        """Number a call and add its ``outputs`` to ``known``. ``turn``: its turn among random operators and effects,
        else 0."""
        reads = not _is_view(call.target)

        def operand(ref: Ref) -> _Operand:
            if ref.value not in known:  # nothing computes it any more
                known[ref.value] = self._number(("lost", ref.value))
            return _Operand(known[ref.value], self.written[known[ref.value]] if reads else 0)

        arguments = map_references((call.args, sorted(call.kwargs.items())), operand)
        number = self._number((id(stands_for(call)), repr(arguments), turn))
        positions = [None] * len(outputs) if call.positions is None else call.positions
        for output, position in zip(outputs, positions, strict=True):
            known[output] = number if position is None else self._number((number, position))
        return number

    def _number(self, expression: Hashable) -> int:
        return self.numbers.setdefault(expression, len(self.numbers))


def _is_view(target: Callable[..., Any]) -> bool:
    """Whether the operator only makes a view: it may run before or after a write to its base."""
    schema = getattr(target, "_schema", None)
    return schema is not None and any(result.alias_info is not None for result in schema.returns)
