"""Whether code continues after an error in what it calls."""

from __future__ import annotations

import builtins
import dis
import functools
import types
from collections.abc import Iterable

from lowtide.capture.python_state.code.code_names import GLOBAL, codes, is_trusted


def catches(functions: Iterable[types.FunctionType]) -> bool:
    """Whether any of these functions, except PyTorch's and Python's own, continues after some error."""
    return any(not is_trusted(function) and _catches(function.__code__) for function in functions)


@functools.lru_cache(maxsize=1 << 14)
def _catches(code: types.CodeType) -> bool:
    return _goes_on(code) or any(
        item.opname == "CHECK_EXC_MATCH" for part in codes(code) for item in dis.get_instructions(part)
    )


@functools.lru_cache(maxsize=1 << 14)
def catches_type_errors(code: types.CodeType) -> bool:
    """Whether code continues after a ``TypeError``."""
    parts = [[*dis.get_instructions(part)] for part in codes(code)]
    return _goes_on(code) or any(
        item.opname == "CHECK_EXC_MATCH" and any(map(_may_be_type_error, part[max(place - 8, 0) : place]))
        for part in parts
        for place, item in enumerate(part)
    )


def _goes_on(code: types.CodeType) -> bool:
    """Whether code continues after some error, of whatever kind."""
    parts = [[*dis.get_instructions(part)] for part in codes(code)]
    return any("suppress" in part.co_names for part in codes(code)) or any(
        item.opname == "PUSH_EXC_INFO" and part[place + 1].opname == "POP_TOP"
        for part in parts
        for place, item in enumerate(part)
    )


def _may_be_type_error(loaded: dis.Instruction) -> bool:
    kind = getattr(builtins, str(loaded.argval), None) if loaded.opname in GLOBAL else None
    return isinstance(kind, type) and issubclass(TypeError, kind) and kind is not object
