"""Clocks that a forward pass reads (``time.perf_counter()``).

Each reading is the number of a tensor that an operator makes (``program.clocks``). Like other numbers of tensors, it
may be computed with, left in attributes, and returned. If code does more with it (makes a text of it, say), planned
calls get what the clock said in the trace.
"""

from __future__ import annotations

import contextlib
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

from lowtide.capture.python_state.code.beside import Code, Variable, places_of
from lowtide.capture.python_state.code.code_names import is_trusted_module
from lowtide.capture.python_state.code.installed import is_installed
from lowtide.capture.read_numbers import TensorNumbers
from lowtide.capture.trace.patches import all_wrapped, stood_for
from lowtide.program.clocks import ASK, NAMES


@contextlib.contextmanager
def clocks_followed(code: Code, numbers: TensorNumbers) -> Iterator[None]:
    """A context in which clocks return stand-ins to code that is neither Python's own nor PyTorch's. Code may read them
    through the module ``time``, or through variables of modules that import them."""

    def asking(function: Callable[[], Any]) -> Callable[[], Any]:
        name = stood_for(function).__name__  # another thread may follow clocks too

        def ask() -> Any:
            calling = sys._getframe(2).f_globals  # skips the frame that tells threads apart
            number = None if is_trusted_module(str(calling.get("__name__"))) else numbers.clock(lambda: ASK(name))
            return function() if number is None else number

        return ask if name in NAMES else function

    with all_wrapped(dict.fromkeys(places_of([(time, NAMES)], (*code[1], *_imported()))), asking):
        yield


def _imported() -> Iterator[Variable]:
    """Module variables that may hold clocks: all variables of modules that are not installed, and in other modules
    those with the names of clocks."""
    for file in [*sys.modules.values()]:
        if isinstance(file, types.ModuleType) and not is_trusted_module(file.__name__):
            variables = vars(file)
            names = NAMES if is_installed(str(getattr(file, "__file__", ""))) else tuple(variables)
            yield from ((file, name, variables[name]) for name in names if name in variables)
