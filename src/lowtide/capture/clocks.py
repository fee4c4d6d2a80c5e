"""Clocks that a forward pass asks (``time.perf_counter()``): each answer is the number of a tensor that an operator makes
(``program.clocks``), and may be computed with, left in attributes and returned as other numbers of tensors are. Where more is
done with one (a text is made of it), it is what the clock said in the trace.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from lowtide.capture.python_state.code.beside import Code, places_of
from lowtide.capture.read_numbers import TensorNumbers
from lowtide.capture.trace.patches import all_wrapped
from lowtide.program.clocks import ASK, NAMES

_CLOCKS = (*NAMES, *(f"{name}_ns" for name in NAMES))


@contextlib.contextmanager
def clocks_followed(code: Code, numbers: TensorNumbers) -> Iterator[None]:
    """Inside, what clocks say to code that is neither Python's nor PyTorch's stands for the number of a tensor: where it asks
    them by the module ``time``, or by a name that they were imported under, another one than their own beside the model's
    ``code`` alone."""

    def asking(name: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
        def wrap(function: Callable[[], Any]) -> Callable[[], Any]:
            def ask() -> Any:
                calling = sys._getframe(2).f_globals  # behind what tells threads apart
                number = None if _is_of_library(calling.get("__name__")) else numbers.clock(lambda: ASK(name))
                return function() if number is None else number

            return ask

        return wrap

    with contextlib.ExitStack() as stack:
        for name in _CLOCKS:
            own = getattr(time, name)
            imported = [
                (file, name) for file in [*sys.modules.values()] if getattr(file, "__dict__", {}).get(name) is own
            ]
            places = [place for place in imported if not _is_of_library(place[0].__name__)]
            stack.enter_context(all_wrapped({*places_of([(time, [name])], code[1]), *places}, asking(name)))
        yield


def _is_of_library(name: Any) -> bool:
    root = str(name).partition(".")[0]
    return root in ("torch", "lowtide") or root in sys.stdlib_module_names
