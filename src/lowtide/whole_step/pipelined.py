"""A whole pipeline, modelled: which of its stages fit, and how long a step takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lowtide.report.tables import fact_lines, table_lines
from lowtide.units import format_bytes, format_percent, format_time
from lowtide.whole_step.answer import Fit
from lowtide.whole_step.ranked import RankedPass
from lowtide.whole_step.stage import Stage


@dataclass(frozen=True, slots=True)
class PipelinedStep:
    """A step of all stages. ``passes``: those of each stage for one micro-batch. The ``slowest`` stage is idle for the
    fraction ``bubble`` of ``time_ns``."""

    passes: tuple[RankedPass, ...]
    time_ns: int
    slowest: int
    bubble: float

    @staticmethod
    def of(passes: Sequence[RankedPass], stages: Sequence[Stage]) -> PipelinedStep:
        time_ns = step_ns([(one.forward_ns, one.time_ns - one.forward_ns) for one in passes], stages)
        slowest = max(range(len(passes)), key=lambda number: passes[number].time_ns)
        busy = stages[0].micro_batches * passes[slowest].time_ns
        return PipelinedStep(tuple(passes), time_ns, slowest, 1 - busy / max(time_ns, 1))

    def __str__(self) -> str:
        slowest = format_time(self.passes[self.slowest].time_ns)
        idle = format_percent(self.bubble)
        return f"{format_time(self.time_ns)}; the slowest is stage {self.slowest} ({slowest} a micro-batch), idle for {idle}"

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("time_ns", "slowest", "bubble")}


def step_ns(passes: Sequence[tuple[int, int]], stages: Sequence[Stage]) -> int:
    """Nanoseconds until the last backward pass has ended. ``passes``: (forward ns, backward ns) of a micro-batch on
    each stage. Sends overlap with computation."""
    orders = [stage.passes for stage in stages]
    ended: dict[tuple[int, bool, int], int] = {}
    clocks, done = [0] * len(stages), [0] * len(stages)
    while any(count < len(order) for count, order in zip(done, orders, strict=True)):
        for stage, order in enumerate(orders):
            while done[stage] < len(order):
                backward, number = order[done[stage]]
                other = stage + 1 if backward else stage - 1
                arrived = 0
                if 0 <= other < len(stages):
                    if (other, backward, number) not in ended:
                        break
                    arrived = ended[other, backward, number] + stages[min(stage, other)].send_ns
                clocks[stage] = max(clocks[stage], arrived) + passes[stage][backward]
                ended[stage, backward, number] = clocks[stage]
                done[stage] += 1
    return max(clocks)


@dataclass(frozen=True, slots=True, eq=False)
class PipelineFit:
    """Whether all ``stages`` of a pipeline fit: the answers of ``fits`` for each stage, in order."""

    stages: tuple[Fit, ...]

    def __bool__(self) -> bool:
        return all(self.stages)

    @property
    def fits_without(self) -> bool:
        """Whether all stages fit without lowtide."""
        return all(one.fits_without for one in self.stages)

    @property
    def tightest(self) -> Fit:
        """The stage that lacks most memory, or if all fit, takes most without a plan."""
        return max(self.stages, key=lambda one: (one.missing_bytes, one.without_bytes))

    @property
    def even_bubble(self) -> float:
        """The fraction of a step in which each stage waits, if all are equally fast and sends take no time."""
        stage = _stage(self.stages[0])
        return (stage.stages - 1) / (stage.micro_batches + stage.stages - 1)

    @property
    def steps(self) -> dict[str, PipelinedStep]:
        """The modelled step for each way of running that all stages have."""
        ways = [dict(one.passes) for one in self.stages]
        stages = [_stage(one) for one in self.stages]
        return {
            how: PipelinedStep.of([way[how] for way in ways], stages)
            for how in ways[0]
            if all(how in way for way in ways)
        }

    def to_json(self) -> dict[str, Any]:
        """The answer as plain data."""
        return {
            "fits": bool(self),
            "fits_without": self.fits_without,
            "tightest": _stage(self.tightest).number,
            "even_bubble": self.even_bubble,
            "steps": {how: step.to_json() for how, step in self.steps.items()},
            "stages": [one.to_json() for one in self.stages],
        }

    def __str__(self) -> str:
        first, tightest = self.stages[0], self.tightest
        verdict = "fits" if self.fits_without else "fits with plans" if self else "does not fit"
        stage, room = _stage(first), format_bytes(first.capacity_bytes - first.reserve_bytes)
        sent = max(map(_stage, self.stages), key=lambda one: one.send_ns)
        facts = {f"step {how}": str(step) for how, step in self.steps.items()}
        facts["bubble"] = f"{format_percent(self.even_bubble)} of a step where all stages are as quick"
        if sent.send_ns:
            facts["sent"] = f"{format_bytes(sent.sent_bytes)} from stage {sent.number} in {format_time(sent.send_ns)}"
        facts["fits least"] = f"stage {_stage(tightest).number}"
        facts |= {f"  advice {n}": text for n, text in enumerate(tightest.advice, 1)}
        return "\n".join(
            [
                f"a pipeline over {first.mesh} {verdict} on {first.device}, of which {room} are free: "
                f"{stage.micro_batches} micro-batches by 1F1B",
                *(f"  {line}" for line in table_lines(self._rows(), left=0)),
                *fact_lines(facts),
            ]
        )

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [
            ("stage", "in flight", "parameters", "without a plan", "with one", "more time", "micro-batch")
        ]
        for one in self.stages:
            stage, ways = _stage(one), dict(one.passes)
            planned = ways.get("with the plan")
            rows.append(
                (
                    str(stage.number),
                    str(stage.in_flight),
                    format_bytes(one.parameter_bytes),
                    format_bytes(one.without_bytes),
                    ("" if one else "at least ") + format_bytes(one.resident_bytes + one.least_bytes),
                    "-" if one.overhead is None else format_percent(one.overhead),
                    format_time((planned or ways["without a plan"]).time_ns),
                )
            )
        return rows


def _stage(fit: Fit) -> Stage:
    assert fit.stage is not None
    return fit.stage
