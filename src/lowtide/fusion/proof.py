"""The proof that a fused program computes what the captured one does.

Every value is an expression: an operator applied to expressions, down to inputs, constants and arriving gradients. Equal
expressions get equal numbers, and a kernel is read as the operators that it stands for (with which it is compared on real
numbers, see ``fusion.kernel``). Outputs, gradients and updates with the same numbers in both programs are therefore the
same operators on the same operands, in whatever order and however often. Random operators and effects also count by
their turn, and what the program overwrites by how often it has been written.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lowtide.errors import CompiledMismatchError
from lowtide.fusion.kernel import Kernel
from lowtide.fusion.routines import stands_for
from lowtide.ir import Op
from lowtide.ir.graph import UPDATE_TARGET
from lowtide.program.program import Call, Program, Ref
from lowtide.program.references import map_references

Numbers = dict[Hashable, int]


def check_same(program: Program, fused: Program) -> None:
    """Raises ``CompiledMismatchError`` where a result of ``fused`` is not the same expression as in ``program``."""
    numbers: Numbers = {}
    expected, found = (_Expressions(each, numbers).results() for each in (program, fused))
    wrong = [name for name in {**expected, **found} if expected.get(name) != found.get(name)]
    if wrong:
        raise CompiledMismatchError(
            f"with its kernels the program no longer computes {', '.join(wrong[:3])}"
            f"{f' and {len(wrong) - 3} more results' if len(wrong) > 3 else ''} as captured, so it is not run. Please report "
            'it; compiler="eager" runs the operators.'
        )


@dataclass(frozen=True, slots=True)
class _Operand:
    """The number of an expression, and how often the program has written over it."""

    number: int
    writes: int


class _Expressions:
    """One program: ``known[value]`` is the number of its expression."""

    def __init__(self, program: Program, numbers: Numbers) -> None:
        self.program = program
        self.numbers = numbers
        self.known: dict[int, int] = {}
        self.turns = 0  # of random operators and effects
        self.written: dict[int, int] = {}  # number of an input -> updates so far
        self.updates: list[int] = []

    def results(self) -> dict[str, int]:
        """The numbers of everything that leaves the program, by name."""
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
            self.known.update(zip(op.outputs, self._opened(call, call.target), strict=True))
            return
        self.turns += op.random or op.effect
        number = self._applied(call, self.known, self.turns if op.random or op.effect else 0)
        self.known.update(zip(op.outputs, self._pieces(number, call.positions, len(op.outputs)), strict=True))
        if op.target == UPDATE_TARGET:
            self.updates.append(number)
            target = self.known[op.inputs[0]]
            self.written[target] = self.written.get(target, 0) + 1

    def _opened(self, call: Call, kernel: Kernel) -> list[int]:
        """The numbers of a kernel's results."""
        local = {number: self.known[ref.value] for number, ref in enumerate(call.args)}
        for line in kernel.body.lines:
            number = self._applied(line.call, local)
            local.update(zip(line.outputs, self._pieces(number, line.call.positions, len(line.outputs)), strict=True))
        return [local[number] for number in kernel.body.results]

    def _applied(self, call: Call, known: dict[int, int], turn: int = 0) -> int:
        """``turn``: among random operators and effects, 0 for all others."""
        written = {} if _is_view(call.target) else self.written

        def operand(ref: Ref) -> _Operand:
            return _Operand(known[ref.value], written.get(known[ref.value], 0))

        arguments = map_references((call.args, sorted(call.kwargs.items())), operand)
        return self._number((id(stands_for(call)), repr(arguments), turn))

    def _pieces(self, number: int, positions: Sequence[int] | None, count: int) -> Iterator[int]:
        if positions is None:
            yield from [number] * count
        else:
            yield from (self._number((number, position)) for position in positions)

    def _number(self, expression: Hashable) -> int:
        return self.numbers.setdefault(expression, len(self.numbers))


def _is_view(target: Callable[..., Any]) -> bool:
    """Whether the operator reads nothing: it may run before or after what it views is written."""
    schema = getattr(target, "_schema", None)
    return schema is not None and any(result.alias_info is not None for result in schema.returns)
