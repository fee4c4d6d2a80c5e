"""Python code that a model runs, and what it names outside itself: global variables, variables of enclosing functions,
defaults.

Reads of these cannot be observed as attribute reads, so they are found in the code: every variable that it names in any
branch and, for classes and modules among these, the attributes that code names anywhere. Installed libraries are taken
to be constant.
"""

from __future__ import annotations

import builtins
import dis
import functools
import itertools
import operator
import re
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch.nn import functional

from lowtide.capture.python_state.code.asked import Named, asked_by, asked_under
from lowtide.capture.python_state.code.installed import is_installed, is_library, is_standard
from lowtide.capture.trace.patches import stood_for
from lowtide.objects.keys import is_looked_into
from lowtide.objects.walk import CONTAINERS, cell_value, is_a, reachable

_TRUSTED = (__name__.partition(".")[0] + ".", "torch.")  # trusted not to read what guards would miss
GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM")
LOADING = (*GLOBAL, *ATTRIBUTE, "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF")
_BY_STRING = {"getattr", "hasattr", "attrgetter", "methodcaller"}  # take attribute names as strings
BY_COMPUTED_NAME = {"getattr", "vars", "__dict__", "getmembers"}  # reach any attribute of anything
_COMPARING = frozenset({"IS_OP", "CONTAINS_OP", "COMPARE_OP"})
_IMPORTING = {"import_module", "__import__"}  # functions that find a module under a name
_OWN_NAMESPACE = {"globals", "eval", "exec"}  # reach any variable
_ADDING = {"append", "appendleft", "extend", "add", "update"}  # methods of containers that return nothing
# Methods that are called without being named.
OPERATORS = frozenset(f"__{side}{name.strip('_')}__" for name in operator.__all__ for side in ("", "r", "i"))
# Instructions after a load that store the result of arithmetic, or an item.
_COUNTING = re.compile(
    r"LOAD_(CONST|FAST|SMALL_INT) BINARY_OP ((SWAP |LOAD_FAST )?STORE_(?P<place>GLOBAL|NAME|DEREF|ATTR)) "
    r"|LOAD_(CONST|FAST|SMALL_INT) COPY COPY BINARY_(SUBSCR|OP) LOAD_(CONST|FAST|SMALL_INT) BINARY_OP SWAP SWAP STORE_SUBSCR "
)


class Names(NamedTuple):
    """What code reads: global ``variables``, ``attributes`` of any object, those of them given as strings (``spelled``,
    which may be missing), and modules that it imports at run time."""

    variables: frozenset[str]
    attributes: frozenset[str]
    modules: frozenset[str]
    spelled: frozenset[str] = frozenset()

    @property
    def all(self) -> frozenset[str]:
        return self.variables | self.attributes


@functools.lru_cache(maxsize=1 << 14)
def names_in(code: types.CodeType) -> Names:
    """The names in the code of a function and of functions inside it."""
    instructions = [item for part in codes(code) for item in dis.get_instructions(part)]

    def operands(*opnames: str) -> frozenset[str]:
        return frozenset(item.argval for item in instructions if item.opname in opnames)

    names = Names(operands(*GLOBAL), operands(*ATTRIBUTE), operands("IMPORT_NAME"))
    if not names.all & _BY_STRING:
        return names
    constants = (constant for part in codes(code) for constant in part.co_consts)
    spelled = frozenset(one for one in constants if isinstance(one, str) and one.isidentifier())
    return names._replace(attributes=names.attributes | spelled, spelled=spelled)


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code of a function and of functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes(constant)


def named_by(value: Any) -> Iterator[tuple[str, Any]]:
    """The values that a function can name, with the names of global variables and of variables in modules."""
    if isinstance(value, functools.partial):
        yield from (("", item) for item in (*value.args, *value.keywords.values(), value.func))
    elif isinstance(value, types.MethodType):
        yield from (("", item) for item in (value.__self__, value.__func__))
    elif isinstance(value, types.FunctionType):
        held = (
            *map(cell_value, value.__closure__ or ()),
            *(value.__defaults__ or ()),
            *(value.__kwdefaults__ or {}).values(),
        )
        yield from (("", item) for item in held)
        names, variables = _any_names_in(value.__code__), value.__globals__
        for name in names:
            if name not in variables:
                continue
            found = variables[name]
            yield f"{variables.get('__name__')}.{name}", found
            if is_a(found, types.ModuleType) and not is_trusted(found):
                own = vars(found)
                yield from [(f"{found.__name__}.{item}", own[item]) for item in names if item in own]


@functools.lru_cache(maxsize=1 << 14)
def _any_names_in(code: types.CodeType) -> frozenset[str]:
    """All names that the code of a function, and of functions inside it, reads or writes on any object."""
    return frozenset(name for part in codes(code) for name in part.co_names)


def parts_of(member: Any) -> tuple[Any, ...]:
    """The functions, or objects that can be written, in an attribute of a class."""
    if is_a(member, property):
        return (member.fget,)
    return (getattr(member, "__func__", member),)


def is_trusted(value: Any) -> bool:
    """Whether it is code of PyTorch, of Python, or of this project."""
    if is_a(value, types.ModuleType):
        module = value.__name__
    else:
        function = value.func if is_a(value, functools.partial) else value
        module = str(getattr(function, "__module__", None) or type(function).__module__)
    return is_trusted_module(module)


@functools.lru_cache(maxsize=1 << 12)
def is_trusted_module(name: str) -> bool:
    return name.startswith(_TRUSTED) or name == "torch" or is_standard(name)


def full_name(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"


def variables_of(function: types.FunctionType) -> Iterator[Named]:
    """The variables that a function reads when it runs, and its defaults. For an installed function: only what it
    closes over (unless it only takes the ``id``) and what it asks for."""
    where, installed = full_name(function), is_installed(function.__code__.co_filename)
    unread = {"__class__"} | (_only_identified(function.__code__) if installed else frozenset())
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if name not in unread:
            yield Named("cell", cell, name, f"{name} in {where}")
    if installed:
        yield from asked_by(function)
        return
    yield from made_of(function)
    variables = function.__globals__
    names = names_in(function.__code__)
    anything = variables.keys() if names.variables & _OWN_NAMESPACE else ()
    for name in sorted(names.variables.union(anything)):  # a global that is added later would hide a built-in
        yield Named("item", variables, name, f"{variables.get('__name__')}.{name}")
        if name not in variables:
            yield Named("item", vars(builtins), name, f"builtins.{name}")
    for name in sorted(names.modules.union(_found_by_name(function))):
        yield Named("item", sys.modules, name, f"the module {name}")
    yield from asked_under(names.all)
    if names.modules - sys.modules.keys():
        yield from asked_under({"import_module"})


def made_of(function: types.FunctionType) -> Iterator[Named]:
    """The code of a function, and its defaults."""
    for name in ("__code__", "__defaults__", "__kwdefaults__"):
        yield Named("made of", function, name, f"{full_name(function)}.{name}")


@functools.lru_cache(maxsize=1 << 14)
def _only_identified(code: types.CodeType) -> frozenset[str]:
    """Variables of enclosing functions of which code only takes the ``id``, as a key of a cache, say."""
    parts = [[item for item in dis.get_instructions(part) if item.opname != "CACHE"] for part in codes(code)]
    loads = [
        (item.argval, before.opname in GLOBAL and before.argval == "id" and "CALL" in after.opname and after.arg == 1)
        for part in parts
        for before, item, after in zip(part, part[1:], part[2:], strict=False)
        if item.opname == "LOAD_DEREF"
    ]
    return frozenset(name for name, _ in loads) - {name for name, identified in loads if not identified}


def value_in(copied: types.FunctionType, variable: Named, value: Any) -> Any:
    """The value of a variable in a copy of the function with its own cells, if the function itself has ``value`` in
    it."""
    if variable.kind == "cell":
        cells = dict(zip(copied.__code__.co_freevars, copied.__closure__ or (), strict=True))
        return cell_value(cells[variable.name]) if variable.name in cells else value
    return getattr(copied, variable.name) if variable.kind == "made of" else value


def _found_by_name(function: types.FunctionType) -> Iterable[str]:
    """Modules that code may find by name: those that it looks up in ``sys.modules``, which may be missing, and of the
    user's modules those whose names it spells or, if it spells none, all."""
    names = names_in(function.__code__).all
    asks = {"sys", "modules"} <= names
    if not names & _IMPORTING and not asks:
        return ()
    theirs = {name for name, module in [*sys.modules.items()] if module is not None and not is_library(module)}
    constants = {one for part in codes(function.__code__) for one in part.co_consts if isinstance(one, str)}
    spelled = {one for one in constants if asks and all(part.isidentifier() for part in one.split("."))}
    return spelled | (theirs & constants or theirs)


def called_by(function: types.FunctionType) -> Iterator[Named]:
    """Of the variables that an installed function names: functions, and objects of the library's own classes (a
    registry of functions, say). All others are constants of the library."""
    variables = function.__globals__
    for name in sorted(names_in(function.__code__).variables & variables.keys()):
        value = variables[name]
        if isinstance(value, types.FunctionType) or _is_of_library(type(value)):
            yield Named("item", variables, name, f"{variables.get('__name__')}.{name}")


def functional_of(function: types.FunctionType) -> Iterator[Named]:
    """The functions of ``torch.nn.functional`` that a function names (one of PyTorch's layers, say), since they may be
    replaced."""
    if function.__globals__ is vars(functional) or function.__globals__.get("F") is functional:
        for name in sorted(names_in(function.__code__).all & vars(functional).keys()):
            value = stood_for(vars(functional)[name])
            if callable(value):
                yield Named("item", vars(functional), name, f"{functional.__name__}.{name}")
            if isinstance(value, types.FunctionType):
                yield from made_of(value)


def _is_of_library(kind: type) -> bool:
    return issubclass(kind, Mapping) and not is_standard(kind.__module__)


@functools.lru_cache(maxsize=1 << 14)
def asks_for_types(code: types.CodeType) -> bool:
    """Whether code asks by ``type`` for the class of anything other than ``self``."""
    instructions = [item for part in codes(code) for item in dis.get_instructions(part)]
    places = [i for i, item in enumerate(instructions) if item.opname in GLOBAL and item.argval == "type"]
    return any(instructions[i + 1].argval != "self" or "CALL" not in instructions[i + 2].opname for i in places)


@functools.lru_cache(maxsize=1 << 14)
def reads_classes(code: types.CodeType) -> bool:
    """Whether code reads ``__class__`` of anything other than ``self``."""
    instructions = [item for part in codes(code) for item in dis.get_instructions(part) if item.opname != "CACHE"]
    pairs = itertools.pairwise(instructions)
    return any(item.opname in ATTRIBUTE and item.argval == "__class__" and of.argval != "self" for of, item in pairs)


@functools.lru_cache(maxsize=1 << 14)
def compares(code: types.CodeType) -> frozenset[str]:
    """How code compares values other than constants: by identity, by equality, or by membership."""
    instructions = [item for part in codes(code) for item in dis.get_instructions(part) if item.opname != "CACHE"]
    pairs = itertools.pairwise(instructions)
    return frozenset(item.opname for before, item in pairs if before.opname != "LOAD_CONST") & _COMPARING


def given(arguments: Iterable[Any]) -> Iterator[Any]:
    """The arguments of a call, and what is in their containers, partials and objects."""
    return reachable(arguments, lambda one: isinstance(one, (*CONTAINERS, functools.partial)) or is_looked_into(one))


def is_read(name: str, functions: Iterable[types.FunctionType], by_string: bool) -> bool:
    """Whether functions do more with variables or attributes of this name than count them up or add to them. True also
    if none names it, and if code may read it ``by_string``, or reads everything."""
    return _uses_in(functions, name, by_string) != {False}


def is_only_stored(name: str, functions: Sequence[types.FunctionType]) -> bool:
    """Whether functions name it only to store something there, as far as names show."""
    stored = any(name in _any_names_in(function.__code__) for function in functions)
    return stored and not _uses_in(functions, name, by_string=True)


def _uses_in(functions: Iterable[types.FunctionType], name: str, by_string: bool) -> set[bool]:
    """For each time that functions load something that has, or may have, this name: whether they do more than write to
    it."""
    hidden = {*BY_COMPUTED_NAME, *_OWN_NAMESPACE} - (set() if by_string else {"getattr"})
    uses: set[bool] = set()
    for function in functions:
        names = names_in(function.__code__)
        uses |= _uses(function.__code__, name) | ({True} if names.all & hidden or _spells(function, name) else set())
    return uses


def _spells(function: types.FunctionType, name: str) -> bool:
    return any(name == constant for part in codes(function.__code__) for constant in part.co_consts)


@functools.lru_cache(maxsize=1 << 14)
def _uses(code: types.CodeType, name: str) -> frozenset[bool]:
    """For each time that code loads something with this name: whether it does more than write to it."""
    parts = [[item for item in dis.get_instructions(part) if item.opname != "CACHE"] for part in codes(code)]
    return frozenset(
        not _is_only_written(part[place + 1 :], name)
        for part in parts
        for place, item in enumerate(part)
        if item.argval == name and item.opname in LOADING
    )


def _is_only_written(after: Sequence[dis.Instruction], name: str) -> bool:
    """Whether what was loaded from this name is stored there again, or is only added to."""
    counting = _COUNTING.match("".join(f"{item.opname.removesuffix('_BORROW')} " for item in after[:10]))
    if counting is not None:
        count = counting.group().count(" ")
        return counting["place"] is None or after[count - 1].argval == name
    if after[0].opname in ATTRIBUTE and after[0].argval in _ADDING:
        return True
    depth = 0
    for item in after:
        depth += dis.stack_effect(item.opcode, item.arg, jump=False)
        if item.opcode in dis.hasjrel or item.opcode in dis.hasjabs or depth <= 0:
            return depth == -2 and item.opname == "STORE_SUBSCR"  # only stored under the key
    return False


def functions_of(kind: type) -> Iterator[Any]:
    """The functions in a class, without those of its bases."""
    for member in [*vars(kind).values()]:
        for part in (*parts_of(member), getattr(member, "func", None)):
            if isinstance(part, (types.FunctionType, functools.partial)):
                yield part


def is_third_party(kind: type) -> bool:
    """Whether a class is of an installed library other than PyTorch, Python and this project."""
    return is_library(kind) and not is_trusted(kind)


def is_code(value: Any) -> bool:
    """Whether it is a function, class or module, and not one that this project puts there while it traces."""
    ours = str(getattr(value, "__module__", "")).startswith(_TRUSTED[0])
    return (callable(value) or isinstance(value, types.ModuleType)) and not ours
