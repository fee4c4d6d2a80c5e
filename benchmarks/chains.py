"""Generated chains of operators, forward and backward, on which small budgets ask for much recomputation.

``CHAINS[name]()`` returns a graph and its costs; the number in the name is that of forward operators. Every operator reads the
one before it, its backward operator the gradient and what the kind says: ``unit`` chains have equal bytes and times, ``random``
ones drawn sizes, times and reads, ``conv`` convolutions, norms and activations in five stages, each of half the bytes, ``skip``
the same down and up again, with four skips between equal stages.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from lowtide.ir import Costs, Graph, Op, Phase

_KIB = 1024


@dataclass(slots=True)
class _Forward:
    """Forward operators by number: bytes in KiB, times, whether the backward operator reads input and output."""

    sizes: list[int] = field(default_factory=list)
    times: list[int] = field(default_factory=list)
    reads_input: list[bool] = field(default_factory=list)
    reads_output: list[bool] = field(default_factory=list)
    skips: dict[int, int] = field(default_factory=dict)  # reader -> what it reads besides the one before

    def add(self, size: int, time: int, reads_input: bool, reads_output: bool) -> None:
        self.sizes.append(size)
        self.times.append(time)
        self.reads_input.append(reads_input)
        self.reads_output.append(reads_output)

    def inputs(self, op: int) -> list[int]:
        before = [op - 1] if op else []
        return sorted({*before, *([self.skips[op]] if op in self.skips else [])})


def unit_chain(length: int) -> tuple[Graph, Costs]:
    """Equal bytes and times."""
    forward = _Forward()
    for _ in range(length):
        forward.add(64, 10, True, False)
    return _with_backward(f"unit_{length}", forward)


def random_chain(length: int, seed: int = 0) -> tuple[Graph, Costs]:
    """Bytes, times, and what is read backward drawn evenly."""
    draw, forward = random.Random(seed), _Forward()
    for _ in range(length):
        forward.add(draw.randint(1, 100), draw.randint(1, 100), draw.random() < 0.5, draw.random() < 0.5)
    return _with_backward(f"random_{length}_{seed}", forward)


def conv_chain(length: int, *, skips: bool = False) -> tuple[Graph, Costs]:
    """Convolution, norm, activation in turn; stages halve the bytes, or halve and double them again."""
    forward, draw = _Forward(), random.Random(length)
    stages = [op * 9 // length if skips else op * 5 // length for op in range(length)]
    for op, stage in enumerate(stages):
        depth = min(stage, 8 - stage) if skips else stage
        forward.add(4096 >> depth, (100, 10, 5)[op % 3] + draw.randint(0, 3), op % 3 < 2, op % 3 == 2)
    for down in range(4) if skips else ():
        activations = [op for op, stage in enumerate(stages) if stage == down and op % 3 == 2]
        convolutions = [op for op, stage in enumerate(stages) if stage == 8 - down and op % 3 == 0]
        forward.skips[convolutions[0]] = activations[-1]
    return _with_backward(f"{'skip' if skips else 'conv'}_{length}", forward)


def _with_backward(name: str, forward: _Forward) -> tuple[Graph, Costs]:
    """Backward operators in reverse, each of twice the time, which give a gradient for every input."""
    length = len(forward.sizes)
    ops = [Op(op, f"f{op}", "op", tuple(forward.inputs(op)), (op,), Phase.FORWARD) for op in range(length)]
    producers, sizes = list(range(length)), list(forward.sizes)
    gradients: list[list[int]] = [[] for _ in range(length)]
    for op in reversed(range(length)):
        reads = {*gradients[op]}
        reads |= {*forward.inputs(op)} if forward.reads_input[op] else set()
        reads |= {op} if forward.reads_output[op] or not gradients[op] else set()
        outputs = []
        for source in forward.inputs(op) or [-1]:
            outputs.append(len(producers))
            producers.append(len(ops))
            sizes.append(forward.sizes[source] if source >= 0 else 1)
            if source >= 0:
                gradients[source].append(outputs[-1])
        ops.append(Op(len(ops), f"b{op}", "op", tuple(sorted(reads)), tuple(outputs), Phase.BACKWARD))
    graph = Graph.of_results(name, ops, producers, (len(producers) - 1,), forward_ops=length)
    times = [*forward.times, *(2 * time for time in reversed(forward.times))]
    return graph, Costs(np.array(times), np.zeros(len(ops), np.int64), np.array(sizes) * _KIB)


CHAINS: dict[str, Callable[[], tuple[Graph, Costs]]] = {
    "unit_40": lambda: unit_chain(40),
    "random_77_0": lambda: random_chain(77),
    "random_77_1": lambda: random_chain(77, 1),
    "conv_77": lambda: conv_chain(77),
    "skip_75": lambda: conv_chain(75, skips=True),
}
