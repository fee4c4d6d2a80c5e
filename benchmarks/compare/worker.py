"""One model under one mechanism, in a process of its own: every setting beside plain eager, taken in turn.

Prints one JSON list of rows. A step is a forward and a backward pass, what the model returned held until its end, as training
loops do. Memory is its exact allocator peak above the level at its start, ``.grad`` absent; on an accelerator what its
allocator reserved beside it. Times are wall clock, there those of events.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import lowtide
from benchmarks.compare.mechanisms import MECHANISMS, Job
from benchmarks.compare.models import COMPARED
from benchmarks.outcomes import error_text, gradient_error
from benchmarks.zoo import Sample, in_precision, loss_of, moved
from lowtide.device import interface_of

_MESSAGE = 300


@dataclass(frozen=True, slots=True)
class Row:
    """One cell. Ratios are to plain eager in the same process: ``peak_ratio`` of bytes, ``time_ratio`` of median times.

    ``gradient_error`` is the largest difference from plain eager's gradients relative to the largest gradient of the same
    parameter (or a thousandth of the largest of all: a key's bias has none but rounding), 0 where all are equal to the bit.
    ``rounding``, of the mechanism ``plain`` alone, is that of plain eager's gradients to those in double precision (in single,
    of a model in a lower one): where activations have a kink, rounding decides on which side an element is. ``lower_bound``
    is proven for the predicted overhead: no schedule of the same operators within the budget has less.
    ``message`` is set where the mechanism failed, and nothing else is then.
    """

    model: str
    mechanism: str
    setting: str
    message: str = ""
    plain_peak_bytes: int = 0
    peak_bytes: int = 0
    reserved_bytes: int = 0
    predicted_peak_bytes: int = 0
    budget_bytes: int = 0
    plain_ns: int = 0
    step_ns: int = 0
    time_ratio: float = 0.0
    predicted_overhead: float = 0.0
    lower_bound: float = 0.0
    prepare_seconds: float = 0.0
    gradient_error: float = 0.0
    rounding: float = 0.0

    @property
    def peak_ratio(self) -> float:
        return self.peak_bytes / self.plain_peak_bytes if self.plain_peak_bytes else 0.0


@dataclass(slots=True, eq=False)
class _Ready:
    """A prepared model, and the times of its steps."""

    setting: str
    sample: Sample
    context: contextlib.AbstractContextManager[Any]
    prepare_seconds: float
    times: list[int] = dataclasses.field(default_factory=list)

    def step(self) -> None:
        model, args, kwargs = self.sample
        with self.context:
            outputs = model(*args, **kwargs)
            loss_of(outputs).backward()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare.worker", description=__doc__)
    parser.add_argument("model", choices=COMPARED)
    parser.add_argument("mechanism", choices=MECHANISMS)
    parser.add_argument("settings", nargs="*")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--planner", default="auto")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    rows = _Comparison(options).run(options.settings or [""])
    sys.stdout.write(json.dumps([dataclasses.asdict(row) for row in rows]) + "\n")
    return 0


class _Comparison:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = torch.device(options.device)
        self.plain = _Ready("", self._sample(), contextlib.nullcontext(), 0.0)
        self.expected = self._gradients(self.plain)
        self.plain_peak_bytes, _ = self._peak(self.plain)
        plain_is_all = options.mechanism == "plain"  # once for a model
        self.rounding = gradient_error(self.expected, self._finer()) if plain_is_all else 0.0

    def run(self, settings: Sequence[str]) -> list[Row]:
        prepared = [self._prepared(setting) for setting in settings]
        ready = [each for each in prepared if isinstance(each, _Ready)]
        for turn in range(-1, self.options.rounds):
            for each in (self.plain, *ready):
                taken = self._timed(each)
                if turn >= 0:
                    each.times.append(taken)
        return [self._row(each) if isinstance(each, _Ready) else each for each in prepared]

    def _sample(self) -> Sample:
        return moved(COMPARED[self.options.model].sample(self.options.batch), self.device)

    def _finer(self) -> dict[str, torch.Tensor]:
        """The gradients in a finer precision."""
        sample = in_precision(self._sample(), COMPARED[self.options.model].finer)
        found = self._gradients(_Ready("", sample, contextlib.nullcontext(), 0.0))
        return {name: gradient.float() for name, gradient in found.items()}

    def _prepared(self, setting: str) -> _Ready | Row:
        """The model under the mechanism, its first step taken; a row with a message where that fails."""
        job = Job(self._sample(), COMPARED[self.options.model].blocks, self.plain_peak_bytes, self.options.planner)
        start = time.perf_counter()
        try:
            context = MECHANISMS[self.options.mechanism].prepare(job, setting)
            ready = _Ready(setting, job.sample, context, time.perf_counter() - start)
            self._timed(ready)
        except Exception as error:  # noqa: BLE001 (whatever a mechanism raises is its result)
            return Row(self.options.model, self.options.mechanism, setting, message=error_text(error, _MESSAGE))
        return ready

    def _row(self, ready: _Ready) -> Row:
        peak, reserved = max(self._peak(ready) for _ in range(2))
        predicted = lowtide.plans(ready.sample[0])[0] if _is_planned(ready) else None
        return Row(
            model=self.options.model,
            mechanism=self.options.mechanism,
            setting=ready.setting,
            plain_peak_bytes=self.plain_peak_bytes,
            peak_bytes=peak,
            reserved_bytes=reserved,
            predicted_peak_bytes=predicted.peak_bytes if predicted else 0,
            budget_bytes=predicted.budget_bytes if predicted else 0,
            plain_ns=int(statistics.median(self.plain.times)),
            step_ns=int(statistics.median(ready.times)),
            # Of each round for itself: a neighbour that slows a round down slows both.
            time_ratio=statistics.median(
                ours / theirs for ours, theirs in zip(ready.times, self.plain.times, strict=True)
            ),
            predicted_overhead=predicted.overhead if predicted else 0.0,
            lower_bound=_lower_bound(predicted) if predicted else 0.0,
            prepare_seconds=ready.prepare_seconds,
            gradient_error=gradient_error(self._gradients(ready), self.expected),
            rounding=self.rounding,
        )

    def _gradients(self, ready: _Ready) -> dict[str, torch.Tensor]:
        """After a step from fresh statistics."""
        model = ready.sample[0]
        model.zero_grad(set_to_none=True)
        ready.step()
        found = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad(set_to_none=True)
        return found

    def _peak(self, ready: _Ready) -> tuple[int, int]:
        """Allocated bytes, and on accelerators reserved ones, above the allocated ones at the start."""
        ready.sample[0].zero_grad(set_to_none=True)
        interface_of(self.device).release_cached()
        found = lowtide.measure(ready.step)
        ready.sample[0].zero_grad(set_to_none=True)
        return found.peak_bytes, 0 if self.device.type == "cpu" else found.reserved_bytes

    def _timed(self, ready: _Ready) -> int:
        ready.sample[0].zero_grad(set_to_none=True)
        taken = interface_of(self.device).timed_ns(ready.step)
        ready.sample[0].zero_grad(set_to_none=True)  # room for the others
        return taken


def _lower_bound(plan: lowtide.Plan) -> float:
    """Of the overhead."""
    total = plan.costs.total_time_ns
    return max(plan.lower_bound_ns / total - 1, 0.0) if plan.lower_bound_ns and total else 0.0


def _is_planned(ready: _Ready) -> bool:
    return getattr(ready.sample[0].__dict__.get("forward"), "_lowtide_runtime", False)


if __name__ == "__main__":
    sys.exit(main())
