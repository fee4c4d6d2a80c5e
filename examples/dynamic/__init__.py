"""Programs that cannot be captured as one graph, in ordinary eager PyTorch.

``python -m examples.dynamic treelstm --budget 50%`` trains one twice, plainly and under ``lowtide.online``, and compares.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from examples.dynamic.program import Program

NAMES = ("treelstm", "lstm", "experts", "early_exit", "maml", "unrolled_gan", "gpt2")


def load(name: str) -> Callable[[int], Program]:
    """The ``make`` of the program of this name: ``make(size)`` builds it anew, always from the same seed."""
    make: Callable[[int], Program] = importlib.import_module(f"examples.dynamic.{name}").make
    return make
