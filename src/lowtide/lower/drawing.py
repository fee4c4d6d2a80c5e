"""Lines of generated code by which random operators draw again what they drew at first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lowtide.ir import Op
from lowtide.program import Program, generators

SAVE = "save_rng"  # the name of ``generators.Draw`` in generated code
Target = Callable[..., Any]


class Drawing:
    """Of one schedule. ``constant`` gives an object a name in generated code."""

    def __init__(self, program: Program, constant: Callable[[Any], str]) -> None:
        self.program = program
        self.constant = constant
        self._noted: set[int] = set()  # about to run, after which it is noted what they drew
        self._replayed: set[int] = set()  # about to run again

    def saved(self, op: Op) -> str:
        """The generator's state is kept for the operator, which runs next."""
        device = self.program.metas[(*op.outputs, *op.inputs)[0]].device
        if self._form(op.id, self.program.calls[op.id].target) is not None:
            self._noted.add(op.id)
        return f"r{op.id} = {SAVE}({self.constant(generators.default_generator(device))})"

    def restored(self, op: int) -> None:
        """The operator runs next, under that state."""
        self._replayed.add(op)

    def due(self, op: int, target: Target, arguments: list[str]) -> tuple[Target, list[str], str]:
        """What runs for an operator, with which arguments, and under which condition: as given and under none, unless it runs
        again; then from a generator of its own, if it takes one."""
        if op not in self._replayed:
            return target, arguments, ""
        self._replayed.discard(op)
        form = self._form(op, target)
        if form is None:
            return target, arguments, f"with r{op}.replayed(): "
        drawn = [*(one for one in arguments if one != "generator=None"), "generator=g"]
        return form, drawn, f"with r{op}.again() as g: "

    def ran(self, op: int) -> list[str]:
        """After the operator."""
        if op not in self._noted:
            return []
        self._noted.discard(op)
        return [f"r{op}.drawn()"]

    def _form(self, op: int, target: Target) -> Target | None:
        return generators.form_with_generator(target, len(self.program.calls[op].args))
