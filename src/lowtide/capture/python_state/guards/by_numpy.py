"""Handle NumPy functions (ufuncs) called with a stand-in for a number (``compared.StandIn``).

A NumPy scalar on the left of an operator calls them too: ``np.float64(0.9) > number``.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lowtide.program.scalars import CHANGING

# Python's equivalents: number compared with another; the same reflected. Below: predicates of the number alone.
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
    """The result of calling an elementwise function with the stand-in ``one``. Raises if the use cannot be recorded."""
    if method != "__call__" or options or function.nout != 1 or not 1 <= len(inputs) <= 2:
        raise one.misused()
    if len(inputs) == 1:
        return np.bool_(one.asked(_ASKING[function])) if function in _ASKING else one.through(function)
    reflected = inputs[0] is not one
    other = inputs[0 if reflected else 1]
    if type(other) is np.ndarray and not other.shape:  # NumPy scalars become 0-d arrays when compared
        other = other[()]
    if function in _COMPARING and (type(other) in (*CHANGING, bool) or type(other) is type(one)):
        return np.bool_(one.compared(_COMPARING[function][reflected], other))
    return one.computed(function, reflected, other)
