"""What it would give if parameters could leave during a step: ``python -m benchmarks.parameters_away``.

They stay (``docs/offload.md`` says why). Here each of 4 KiB or more is a result of the program instead of an input, so that a
plan may take it to a second memory between its readings; all are there when the step begins and when it ends. The least that
parameters and pass take together is searched for with activations that may move and transfers that take no time, once with
gradients that are kept and once with gradients that are used as soon as they are final, as by ``optimizer=``. Nothing is run.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.compare.models import COMPARED
from benchmarks.turns import keep
from lowtide.capture import capture
from lowtide.cost import analytical_costs
from lowtide.errors import InfeasibleBudgetError
from lowtide.ir import Op, Phase, SecondMemory
from lowtide.planning import make_plan
from lowtide.program import Program
from lowtide.program.insertions import Insertion, inserted
from lowtide.program.program import Call
from lowtide.program.tangents import with_own_tangents

RESULTS = Path(__file__).parent / "results" / "parameters_away"
_LEAST_BYTES = 4096
_HEADING = "| model | gradients | parameters, MiB | they stay, MiB | they may leave, MiB | less |"
_NO_CALL = Call(lambda: None, (), {}, ())  # nothing is run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parameters_away", description=__doc__)
    parser.add_argument("--models", default="gpt2,llama,t5,unet")
    parser.add_argument("--output", type=Path, default=RESULTS, help="written as .json and .md")
    options = parser.parse_args()
    rows = []
    print(_HEADING)
    for name in options.models.split(","):
        model, args, kwargs = COMPARED[name].sample()
        program = with_own_tangents(capture(model, args, kwargs).program)
        for gradients, changed in (("kept", program), ("used", _used(program))):
            leaving, parameter_bytes = _leaving(changed)
            stay = parameter_bytes + _least_bytes(changed)
            row = {"model": name, "gradients": gradients, "parameter_bytes": parameter_bytes, "stay_bytes": stay}
            rows.append({**row, "leave_bytes": _least_bytes(leaving)})
            print(_line(rows[-1]), flush=True)
        keep(options.output, rows, _table(rows))
    return 0


def _used(program: Program) -> Program:
    """``program``, each of whose gradients is used by an operator as soon as it is final, and goes."""
    graph = program.graph
    touched = {graph.values[value].storage: op.id for op in graph.ops for value in (*op.inputs, *op.outputs)}
    found = []
    for position, value in program.gradients:
        op = Op(-1, f"use of gradient {position}", "lowtide.use", (value,), (), Phase.BACKWARD, effect=True)
        found.append(Insertion(touched[graph.values[value].storage], op, _NO_CALL))
    changed, gone = inserted(program, found), {value for _, value in program.gradients}
    outputs = tuple(value for value in graph.outputs if value not in gone)
    return replace(changed, graph=replace(changed.graph, outputs=outputs), gradients=())


def _leaving(program: Program) -> tuple[Program, int]:
    """``program``, whose parameters are results that are due at its end, and their bytes."""
    given = (value for value in program.inputs[: program.parameters] if value is not None)
    chosen = [value for value in given if program.metas[value].storage_bytes >= _LEAST_BYTES]
    found = []
    for value in chosen:
        op = Op(-1, f"parameter {value}", "lowtide.parameter", (), (value,), Phase.FORWARD, once=True)
        found.append(Insertion(-1, op, _NO_CALL, (program.graph.values[value].storage,)))
    changed = inserted(program, found)
    inputs = tuple(value for value in changed.graph.inputs if value not in chosen)
    graph = replace(changed.graph, inputs=inputs, outputs=(*changed.graph.outputs, *chosen))
    taken = (None if value in chosen else value for value in changed.inputs)
    nbytes = sum(program.metas[value].storage_bytes for value in chosen)
    return replace(changed, graph=graph, inputs=tuple(taken)), nbytes


def _least_bytes(program: Program) -> int:
    """The least budget for a pass for which a plan is known, with a second memory that is as quick as one could be."""
    memory = SecondMemory(10**12, 10**12, 0, None, name="disk")
    costs = replace(analytical_costs(program, "auto"), second_memory=memory)
    try:
        make_plan(program.graph, costs, budget=1, planner="auto{effort=0}")
    except InfeasibleBudgetError as error:
        return error.minimum_bytes
    raise AssertionError("a pass took a byte")


def _line(row: dict[str, Any]) -> str:
    sizes = [f"{row[name] / 2**20:.1f}" for name in ("parameter_bytes", "stay_bytes", "leave_bytes")]
    cells = [row["model"], row["gradients"], *sizes, f"{1 - row['leave_bytes'] / row['stay_bytes']:.1%}"]
    return f"| {' | '.join(cells)} |"


def _table(rows: list[dict[str, Any]]) -> str:
    heading = [_HEADING, "|" + "---|" * (_HEADING.count("|") - 1)]
    return "\n".join([(__doc__ or "").strip(), "", *heading, *map(_line, rows)]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
