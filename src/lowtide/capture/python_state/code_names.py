"""Python code that a model runs: what it can name, and what it names."""

from __future__ import annotations

import contextlib
import dis
import functools
import site
import sys
import sysconfig
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

_TRUSTED = (__name__.partition(".")[0] + ".", "torch.")  # whose code knows what it does
_LIBRARIES = tuple({*site.getsitepackages(), *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")), "<frozen"})
_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME")
_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")
_OURS = str(Path(__file__).parents[2])


class Names(NamedTuple):
    """What code reads: global variables, and attributes of anything."""

    variables: frozenset[str]
    attributes: frozenset[str]


@functools.lru_cache(maxsize=1 << 12)
def names_in(code: types.CodeType) -> Names:
    """In the code of a function and of those inside it."""
    instructions = [item for part in codes(code) for item in dis.get_instructions(part)]
    return Names(
        frozenset(item.argval for item in instructions if item.opname in _GLOBAL),
        frozenset(item.argval for item in instructions if item.opname in _ATTRIBUTE),
    )


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code of a function and of those inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes(constant)


def named_by(value: Any) -> Iterator[tuple[str, Any]]:
    """The values that a function can name, with the names of global ones, and of those in modules."""
    if isinstance(value, functools.partial):
        yield from (("", item) for item in (*value.args, *value.keywords.values(), value.func))
    elif isinstance(value, types.MethodType):
        yield from (("", item) for item in (value.__self__, value.__func__))
    elif isinstance(value, types.FunctionType):
        yield from (("", item) for _, _, item in cells_of(value))
        names = {name for code in codes(value.__code__) for name in code.co_names}  # read or written, of whatever
        for name in names & value.__globals__.keys():
            found = value.__globals__[name]
            yield f"{value.__globals__.get('__name__')}.{name}", found
            if isinstance(found, types.ModuleType) and not is_trusted(found):
                own = vars(found)
                yield from ((f"{found.__name__}.{item}", own[item]) for item in names & own.keys())
        yield from (("", default) for default in defaults_of(value))


def cells_of(function: types.FunctionType) -> Iterator[tuple[str, types.CellType, Any]]:
    """Variables of functions around it: name, cell and value."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # empty
            yield name, cell, cell.cell_contents


def defaults_of(function: types.FunctionType) -> tuple[Any, ...]:
    return (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())


def parts_of(member: Any) -> tuple[Any, ...]:
    """What there is to run, or to write to, in an attribute of a class."""
    if isinstance(member, property):
        return (member.fget,)
    return (getattr(member, "__func__", member),)


def is_trusted(value: Any) -> bool:
    """Whether it is code, a hook say, of PyTorch's, of Python's or of this project's own."""
    if isinstance(value, types.ModuleType):
        module = value.__name__
    else:
        function = value.func if isinstance(value, functools.partial) else value
        module = str(getattr(function, "__module__", None) or type(function).__module__)
    return module.startswith(_TRUSTED) or module == "torch" or is_standard(module)


def is_standard(module: str) -> bool:
    """Whether it is the name of a module of Python's own."""
    return module != "__main__" and module.partition(".")[0] in sys.stdlib_module_names


def is_installed(filename: str) -> bool:
    """Whether it is a file of an installed library, or of this project."""
    return filename.startswith((*_LIBRARIES, _OURS)) or "site-packages" in filename


def full_name(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
