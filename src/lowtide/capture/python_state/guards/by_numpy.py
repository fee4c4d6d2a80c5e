"""Functions of NumPy's that are called with what stands for a number (``compared.StandIn``), and perhaps with another number.

A scalar of NumPy's calls them, too, where it stands on the left: ``np.float64(0.9) > number``.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lowtide.program.scalars import CHANGING

# In Python's words: between the number and another one, and the other way around; and of the number alone.
_COMPARING: dict[Any, tuple[Callable[[Any, Any], bool], Callable[[Any, Any], bool]]] = {
    np.less: (operator.lt, operator.gt),
    np.less_equal: (operator.le, operator.ge),
    np.greater: (operator.gt, operator.lt),
    np.greater_equal: (operator.ge, operator.le),
    np.equal: (operator.eq, operator.eq),
    np.not_equal: (operator.ne, operator.ne),
}
_ASKING: dict[Any, Callable[[Any], bool]] = {
    np.isnan: math.isnan,
    np.isinf: math.isinf,
    np.isfinite: math.isfinite,
}


def called(one: Any, function: Any, method: str, inputs: Sequence[Any], options: dict[str, Any]) -> Any:
    """What comes of the call of an elementwise function with the stand-in ``one``. Raises where more is done than is known."""
    if method != "__call__" or options or function.nout != 1 or not 1 <= len(inputs) <= 2:
        raise one.misused()
    if len(inputs) == 1:
        return np.bool_(one.asked(_ASKING[function])) if function in _ASKING else one.through(function)
    reflected = inputs[0] is not one
    other = inputs[0 if reflected else 1]
    if type(other) is np.ndarray and not other.shape:  # what scalars of NumPy's make of themselves to be compared
        other = other[()]
    if function in _COMPARING and (type(other) in (*CHANGING, bool) or type(other) is type(one)):
        return np.bool_(one.compared(_COMPARING[function][reflected], other))
    return one.computed(function, reflected, other)
