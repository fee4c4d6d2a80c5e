"""Formulas of gradients that operators were given by ``torch.library``: code of the user's that no code of the model names."""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from lowtide.capture.python_state.code.asked import Named
from lowtide.objects.walk import closed_over
from lowtide.program.results import below

_FORMULAS = ("_setup_context_fn", "_backward_fn")  # attributes of what the autograd function of an operator refers to


def formulas(results: Sequence[torch.Tensor]) -> Iterator[Named]:
    """Those that the backward pass of traced results comes to, by the operators that have them."""
    functions: dict[Any, None] = {getattr(node, "_forward_cls", None): None for node in below(results)}
    for backward in (getattr(function, "backward", None) for function in functions):
        for owner in closed_over(backward) if isinstance(backward, types.FunctionType) else ():
            for name in _FORMULAS:
                if name in getattr(owner, "__dict__", ()):
                    yield Named("attribute", owner, name, f"{name} of {getattr(owner, '_qualname', 'an operator')}")
