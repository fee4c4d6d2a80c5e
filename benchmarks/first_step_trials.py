"""What ``benchmarks.first_step`` measures, each in a process of its own, whose caches are those of the environment."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

import lowtide
from benchmarks.compare.models import SMALL
from benchmarks.graph_models import GRAPH_MODELS
from benchmarks.zoo import Sample, loss_of, tokens
from lowtide.stage_times import stage_seconds

DEEP = "gpt2_12"
MODELS: dict[str, Callable[[], Sample]] = {
    DEEP: GRAPH_MODELS[DEEP],
    **{name: compared.sample for name, compared in SMALL.items()},
}
COMPILED = ("gpt2", "t5", "vit")
BACKENDS = ("inductor", "lowtide")  # by their names in torch.compile; the first is PyTorch's own
_BUDGET = "50%"
_DROPOUT = 0.1
_SHAPES, _BATCH, _LONGEST, _SHORTEST, _VOCABULARY = 20, 4, 256, 64, 512


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds of wall time; ``stages`` by name, ``prepare`` all of them with what lies between. ``kernels``: distinct ones."""

    model: str
    compiler: str
    kind: str
    kernels: int
    plain: float
    stages: dict[str, float]
    prepare: float
    first_step: float

    @property
    def total(self) -> float:
        return self.prepare + self.first_step


@dataclass(frozen=True, slots=True)
class Compiled:
    """The first steps of a model with dropout under ``torch.compile``: seconds of wall time, and how often a plan was made."""

    model: str
    backend: str
    steps: list[float]
    plans: int


@dataclass(frozen=True, slots=True)
class Shape:
    """The ``number``-th length of a text that a model meets: seconds of its first step, and of the quickest of later ones."""

    number: int
    length: int
    first: float
    later: float


def start(model: str, compiler: str, kind: str) -> Start:
    """Prepare the model and take a step."""
    module, args, kwargs = MODELS[model]()
    loss_of(module(*args, **kwargs)).backward()  # what eager itself makes once
    plain = _timed(lambda: loss_of(module(*args, **kwargs)).backward())
    with stage_seconds() as stages:
        prepare = _timed(lambda: lowtide.rematerialize(module, args, kwargs, budget=_BUDGET, compiler=compiler))
    first_step = _timed(lambda: loss_of(module(*args, **kwargs)).backward())
    lowtide.wait(module)  # the plan is kept for the cached start
    targets = {op.target for op in lowtide.plans(module)[0].graph.ops}
    kernels = sum(target.startswith("lowtide.fused_") for target in targets)
    return Start(model, compiler, kind, kernels, plain, dict(stages), prepare, first_step)


def compiled(model: str, backend: str) -> Compiled:
    """Take three steps of the compiled model."""
    module, args, kwargs = MODELS[model]()
    for each in module.modules():
        if isinstance(each, nn.Dropout):
            each.p = _DROPOUT
    made = _Plans()
    options = {"budget": _BUDGET} if backend == "lowtide" else None
    run = torch.compile(module, backend=backend, options=options)
    steps = [_timed(lambda: loss_of(run(*args, **kwargs)).backward()) for _ in range(3)]
    return Compiled(model, backend, steps, made.count)


def shapes() -> list[Shape]:
    """GPT-2 meets twenty lengths, after it was rematerialized for the longest."""
    module = MODELS["gpt2"]()[0]
    between = random.Random(0).sample(range(_SHORTEST, _LONGEST), _SHAPES - 1)

    def step(length: int) -> float:
        ids = tokens(_BATCH, length, _VOCABULARY)
        return _timed(lambda: loss_of(module(input_ids=ids, labels=ids)).backward())

    ids = tokens(_BATCH, _LONGEST, _VOCABULARY)
    lowtide.rematerialize(module, (), {"input_ids": ids, "labels": ids}, budget=_BUDGET)
    found = []
    for number, length in enumerate([_LONGEST, *between], 1):
        first = step(length)
        found.append(Shape(number, length, first, min(step(length) for _ in range(3))))
    lowtide.restore(module)
    return found


class _Plans(logging.Handler):
    """Counts those that are made from now on."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.count = 0
        logger = logging.getLogger("lowtide.runtime.programs.programs")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.count += record.getMessage().startswith("planned ")


def _timed(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began
