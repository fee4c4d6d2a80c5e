"""Where the memory of a training script goes, and what each budget would cost, from a few watched steps."""

from __future__ import annotations

import dataclasses
import gc
import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from lowtide.capture import capture
from lowtide.capture.trace.checkpoints import is_left_to_plan
from lowtide.integrations.interpreter import Enough
from lowtide.integrations.roots import WORTH_FREEING, Root, Roots, not_planned, refused
from lowtide.ir import Costs
from lowtide.pipeline import make_program_plan, program_costs
from lowtide.planning import Plan
from lowtide.program import Program
from lowtide.program.sizes import held_bytes
from lowtide.progress import Progress
from lowtide.report.curve import CURVE_PLANNER, Curve, CurvePoint, make_curve
from lowtide.report.modules import merge_repeats
from lowtide.report.report import Report
from lowtide.report.tables import fact_lines, table_lines
from lowtide.settings import Settings
from lowtide.units import format_bytes, format_percent

SHARES = (90, 80, 70, 60, 50, 40, 30)  # the budgets that are priced, in percent of the peak
_MOST_ROWS = 40
WORTHWHILE = 0.1  # largest overhead of a budget that is suggested


@dataclass
class Watched:
    """A trained module, its ``program`` at its first call, or a much larger one, and what it takes ``beside`` a pass, by name
    in bytes. ``checkpoints``: whether it recomputes by itself (``torch.utils.checkpoint``), which the program does not."""

    root: Root
    program: Program
    costs: Costs
    parameters: list[nn.Parameter]  # while it is watched
    beside: dict[str, int]
    checkpoints: bool = False

    @property
    def own_bytes(self) -> int | None:
        """Of a pass as the script runs it, where that recomputes by itself and was measured."""
        return self.root.measured_bytes if self.checkpoints else None


class Watch:
    """A context that captures what a script trains, at its first call and again at one with twice the arguments (the
    first may have asked for a shape, with one row). The script runs unchanged. After ``steps`` steps, ``Enough`` is
    raised.

    A step is one of an optimizer, or a backward pass if there is no optimizer. ``watched``: what was captured.
    """

    def __init__(self, steps: int, say: Callable[[str], None]) -> None:
        self.watched: list[Watched] = []
        self.roots = Roots(self._found, ended=self._pass_ended)
        self._steps, self._say = steps, say
        self._done: Counter[int] = Counter()  # steps by the optimizer's id
        self._optimizer: Optimizer | None = None  # that has not made a step
        self._process = os.getpid()  # those that it forks run on

    def __enter__(self) -> Watch:
        self._hook = register_optimizer_step_post_hook(self._stepped)
        self.roots.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.roots.__exit__(*error)
        self._hook.remove()
        for watched in self.watched:
            watched.parameters.clear()

    def _found(self, root: Root, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        reason = not_planned(module) if os.getpid() == self._process else "another process trains it"
        if reason:
            root.outside = reason
            return
        root.asks_again = True
        with refused(root):
            with torch.enable_grad():
                program = capture(module, args, kwargs).program
            parameters, costs = list(module.parameters()), program_costs(program)
            beside = {"parameters": _tensor_bytes(parameters), "buffers": _tensor_bytes(module.buffers())}
            beside["gradients, within the pass"] = _tensor_bytes(one for one in parameters if one.requires_grad)
            inside = set(map(id, module.modules()))  # replaces its submodules, and its own smaller call
            self.watched = [one for one in self.watched if id(one.root.module()) not in inside]
            self.watched.append(Watched(root, program, costs, parameters, beside, is_left_to_plan(module)))
        if root.outside:
            self._say(f"{root.name} cannot be planned as a whole: {root.outside}")
        root.outside = root.outside or "it is watched"

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if os.getpid() != self._process:
            return
        for watched in self.watched:
            states = [optimizer.state[p] for p in watched.parameters if p in optimizer.state]
            name = f"states of {type(optimizer).__name__}"
            watched.beside[name] = sum(_tensor_bytes(state.values()) for state in states)
        self._done[id(optimizer)] += 1
        if self._done[id(optimizer)] >= self._steps and self.watched:
            raise Enough(0)

    def _pass_ended(self) -> None:
        is_early = self.roots.passes < self._steps or os.getpid() != self._process
        if is_early or self._done or self._optimizer is not None:
            return
        # By its type: some objects warn when they are asked for their class.
        self._optimizer = next((one for one in gc.get_objects() if issubclass(type(one), Optimizer)), None)
        if self._optimizer is None and self.watched:
            raise Enough(0)


def _tensor_bytes(values: Iterable[Any]) -> int:
    """Bytes of the storages behind the tensors among ``values``."""
    return held_bytes(value for value in values if isinstance(value, torch.Tensor))


@dataclass(frozen=True)
class Advice:
    """The advice for one module. ``plain``: the plan without recomputation. ``curve``: the price of each budget.
    ``suggested``: the point of the curve that is advised, or ``None``."""

    watched: Watched
    plain: Plan
    curve: Curve
    suggested: CurvePoint | None
    report: Report  # of the suggested plan

    def text(self, script: str) -> str:
        """A text with the memory of each module, the cost of each budget, and the command to type for ``script``."""
        root = self.watched.root
        facts = {name: format_bytes(count) for name, count in self.watched.beside.items() if count}
        measured = "" if root.measured_bytes is None else f", {format_bytes(root.measured_bytes)} measured"
        facts["a forward and backward pass"] = f"{format_bytes(self.plain.peak_bytes)} predicted{measured}"
        parts = [
            "\n".join([f"{root.name}: where memory goes", *fact_lines(facts)]),
            "\n".join(["saved for the backward pass, without a budget", *_modules(self.plain)]),
            f"what a budget of the pass costs\n{self.curve}",
            self._suggestion(script),
        ]
        return "\n\n".join(parts)

    def _suggestion(self, script: str) -> str:
        point, whole, own = self.suggested, self.curve.unconstrained_peak_bytes, self.watched.own_bytes
        now = "the whole pass" if own is None else f"the {format_bytes(own)} that it takes by its own checkpointing"
        if point is None:
            return f"no budget well below {now} is met: little would be gained"
        share = -(-100 * point.budget_bytes // max(whole, 1))
        costs = f"{format_percent(self.curve.overhead(point.time_ns))} longer per pass (predicted)"
        gain = f"takes {format_bytes(whole - point.budget_bytes)} less, and {costs}"
        if own is not None:
            gain = f"takes {format_bytes(point.budget_bytes)} instead of {now},\n  and is {costs} than without recomputation"
        return f"lowtide run --budget {share}% {script}\n  {gain}"


def _modules(plan: Plan) -> list[str]:
    rows = merge_repeats(plan.as_report().rows)
    most = sorted(rows, key=lambda row: -row.saved_bytes)[:_MOST_ROWS]
    cells = [(name, saved, time) for name, saved, _, _, time in (row.cells() for row in rows if row in most)]
    more = [f"and {len(rows) - len(most)} more, smaller ones"] if len(rows) > len(most) else []
    return [*table_lines([("module", "saved", "time"), *cells]), *more]


def advise(watched: Watched, on_progress: Progress | None = None) -> Advice:
    """Price the budgets in ``SHARES`` for a watched module. Takes seconds for each."""
    program, costs = watched.program, watched.costs
    plain = make_program_plan(program, Settings(budget="100%"), costs=costs)
    whole = plain.unconstrained_peak_bytes
    budgets = [whole * share // 100 for share in SHARES]
    curve = make_curve(program.graph, costs, budgets=budgets, on_progress=on_progress)
    taken = whole if watched.own_bytes is None else min(whole, watched.own_bytes)
    less = [point for point in curve.points if point.budget_bytes <= (1 - WORTH_FREEING) * taken]
    cheap = [point for point in less if curve.overhead(point.time_ns) <= WORTHWHILE]
    suggested = cheap[-1] if cheap else (less[0] if less else None)
    plan = plain
    if suggested is not None:
        plan = make_program_plan(program, Settings(budget=suggested.budget_bytes, planner=CURVE_PLANNER), costs=costs)
    report = dataclasses.replace(plan, known_curve=curve).as_report()
    report = dataclasses.replace(report, beside=watched.beside)
    return Advice(watched, plain, curve, suggested, report)
