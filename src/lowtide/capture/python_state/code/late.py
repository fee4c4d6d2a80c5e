"""What the user's code reads in a backward pass. Eager runs such code then, so another value means another gradient.

A planned backward pass does not run this code. What it names is known from the trace, in which it ran.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from lowtide.capture.python_state.code.asked import Named
from lowtide.capture.python_state.code.code_names import names_in
from lowtide.capture.trace.patches import wrapped
from lowtide.objects.walk import closed_over
from lowtide.program.results import below

_OTHERS = sys.stdlib_module_names | {"torch", "sympy", "lowtide"}  # code that such code calls, and that traces it
_FORMULAS = ("_setup_context_fn", "_backward_fn")  # attributes that lead from autograd functions to formulas


@contextlib.contextmanager
def named(names: set[str]) -> Iterator[None]:
    """A context for a forward and a backward pass. Adds to ``names`` the variables and attributes named by autograd
    functions in the backward pass, by hooks on tensors, and by what these call. Does nothing under a profiler that
    someone has started."""

    def called(frame: types.FrameType, event: str, _: Any) -> None:
        if event == "call" and str(frame.f_globals.get("__name__")).partition(".")[0] not in _OTHERS:
            names.update(names_in(frame.f_code).all, frame.f_code.co_freevars)

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            if sys.getprofile() is not None:
                return function(*args)
            sys.setprofile(called)
            try:
                return function(*args)
            finally:
                sys.setprofile(None)

        return noted

    def hooking(register: Callable[..., Any]) -> Callable[..., Any]:
        return lambda tensor, hook: register(tensor, noting(hook))

    with wrapped(BackwardCFunction, "apply", noting), wrapped(torch.Tensor, "register_hook", hooking):
        yield


def formulas(results: Sequence[torch.Tensor]) -> Iterator[Named]:
    """The gradient formulas of operators that got them by ``torch.library`` and that the backward pass of traced
    results reaches. They are the user's code, but no code of the model names them."""
    functions: dict[Any, None] = {getattr(node, "_forward_cls", None): None for node in below(results)}
    for backward in (getattr(function, "backward", None) for function in functions):
        for owner in closed_over(backward) if isinstance(backward, types.FunctionType) else ():
            for name in _FORMULAS:
                if name in getattr(owner, "__dict__", ()):
                    yield Named("attribute", owner, name, f"{name} of {getattr(owner, '_qualname', 'an operator')}")
