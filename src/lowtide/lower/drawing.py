"""Generates code that makes recomputed random operators draw the same numbers as at first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lowtide.ir import Op
from lowtide.program import Program, generators

SAVE = "save_rng"  # the name of ``generators.Draw`` in generated code
Target = Callable[..., Any]


class Drawing:
    """State for one schedule. ``constant`` returns an object's name in generated code."""

    def __init__(self, program: Program, constant: Callable[[Any], str]) -> None:
        self.program = program
        self.constant = constant
        self._noted: set[int] = set()  # ops about to run, after which their draw is recorded
        self._replayed: set[int] = set()  # ops about to be recomputed

    def saved(self, op: Op) -> str:
        """Return the line that saves the generator's state for the operator, which runs next."""
        device = self.program.metas[(*op.outputs, *op.inputs)[0]].device
        if self._form(op.id, self.program.calls[op.id].target) is not None:
            self._noted.add(op.id)
        return f"r{op.id} = {SAVE}({self.constant(generators.default_generator(device))})"

    def restored(self, op: int) -> None:
        """Note that the operator is recomputed next, under its saved state."""
        self._replayed.add(op)

    def due(self, op: int, target: Target, arguments: list[str]) -> tuple[Target, list[str], str]:
        """Return the target, arguments and code prefix to run an operator: unchanged and none on its first run; on a recompute,
        with a generator of its own if its form takes one, else under the replayed state."""
        if op not in self._replayed:
            return target, arguments, ""
        self._replayed.discard(op)
        form = self._form(op, target)
        if form is None:
            return target, arguments, f"with r{op}.replayed(): "
        drawn = [*(one for one in arguments if one != "generator=None"), "generator=g"]
        return form, drawn, f"with r{op}.again() as g: "

    def ran(self, op: int) -> list[str]:
        """Return the lines to run after the operator."""
        if op not in self._noted:
            return []
        self._noted.discard(op)
        return [f"r{op}.drawn()"]

    def _form(self, op: int, target: Target) -> Target | None:
        return generators.form_with_generator(target, len(self.program.calls[op].args))
