"""Small wrong changes of a Python file: what a slip of the hand would do, one at a time.

A mutant swaps a comparison, moves an integer by one, exchanges ``and`` and ``or``, ``+`` and ``-`` or ``min`` and
``max``, negates a condition or leaves a statement out. Annotations, docstrings, error messages and logging are left alone.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_EXCHANGED = {"min": "max", "max": "min", "any": "all", "all": "any"}
_SPEAKING = ("logger", "_LOG", "warnings")

Change = Callable[[ast.AST], None]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change: the ``site``-th node that changes in the file's tree, in its ``variant``-th way."""

    path: Path
    site: int
    variant: int
    line: int
    before: str
    after: str

    def source(self) -> str:
        """The whole file with the change in it."""
        tree = ast.parse(self.path.read_text())
        _apply(tree, self.site, self.variant)
        return ast.unparse(tree)


def mutants_of(path: Path) -> list[Mutant]:
    """Every mutant of the file, in the order of its lines."""
    tree = ast.parse(path.read_text())
    found = []
    for site, (node, statement) in enumerate(_sites(tree)):
        for variant in range(len(_changes(node))):
            changed = _changed_statement(statement, node, variant)
            if changed != _text(statement):
                found.append(Mutant(path, site, variant, node.lineno, _text(statement), changed))
    return found


def _apply(tree: ast.AST, site: int, variant: int) -> None:
    node, _ = list(_sites(tree))[site]
    _changes(node)[variant](node)


def _changed_statement(statement: ast.stmt, node: ast.AST, variant: int) -> str:
    """The statement's text after the change. Changes are made to a copy."""
    index = next(number for number, found in enumerate(ast.walk(statement)) if found is node)
    copied = copy.deepcopy(statement)
    changed = list(ast.walk(copied))[index]
    _changes(changed)[variant](changed)
    return _text(copied)


def _text(statement: ast.stmt) -> str:
    return (
        ast.unparse(statement).split("\n")[0] if _is_compound(statement) else " ".join(ast.unparse(statement).split())
    )


def _is_compound(statement: ast.stmt) -> bool:
    return hasattr(statement, "body")


def _sites(tree: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, ast.stmt]]:
    """The nodes that can be changed, each with the statement around it."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.stmt):
            yield from _in_statement(child)
        elif isinstance(child, (ast.ExceptHandler, ast.match_case)):
            yield from _sites(child)


def _in_statement(statement: ast.stmt) -> Iterator[tuple[ast.expr | ast.stmt, ast.stmt]]:
    if _is_left_alone(statement):
        return
    if _changes(statement):
        yield statement, statement
    for field, value in ast.iter_fields(statement):
        if field in ("annotation", "returns", "decorator_list", "type_params", "bases", "keywords", "args"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.expr):
                yield from (
                    (node, statement) for node in ast.walk(child) if isinstance(node, ast.expr) and _changes(node)
                )
            elif isinstance(child, ast.stmt):
                yield from _in_statement(child)
            elif isinstance(child, (ast.ExceptHandler, ast.match_case)):
                yield from _sites(child)


def _is_left_alone(statement: ast.stmt) -> bool:
    if isinstance(statement, (ast.Import, ast.ImportFrom, ast.Raise, ast.Assert)):
        return True
    if isinstance(statement, ast.Expr):
        value = statement.value
        return isinstance(value, ast.Constant) or (isinstance(value, ast.Call) and _speaks(value))
    return isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test)


def _speaks(call: ast.Call) -> bool:
    return ast.unparse(call.func).split(".")[0] in _SPEAKING


def _changes(node: ast.AST) -> list[Change]:
    """What can be done to this node alone."""
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in _COMPARISONS:
            return [lambda node: setattr(node, "ops", [_COMPARISONS[type(node.ops[0])]()])]
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return [
                lambda node: setattr(node, "value", node.value + 1),
                lambda node: setattr(node, "value", node.value - 1),
            ]
        case ast.BoolOp():
            return [lambda node: setattr(node, "op", ast.Or() if isinstance(node.op, ast.And) else ast.And())]
        case ast.BinOp(op=ast.Add() | ast.Sub()):
            return [lambda node: setattr(node, "op", ast.Sub() if isinstance(node.op, ast.Add) else ast.Add())]
        case ast.Call(func=ast.Name(id=name)) if name in _EXCHANGED:
            return [lambda node: setattr(node.func, "id", _EXCHANGED[node.func.id])]
        case ast.If() | ast.While() | ast.IfExp():
            return [_negate]
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Continue():
            return [_leave_out]
        case ast.Assign(targets=[ast.Subscript() | ast.Attribute()]):
            return [_leave_out]
    return []


def _negate(node: ast.AST) -> None:
    assert isinstance(node, (ast.If, ast.While, ast.IfExp))
    node.test = ast.UnaryOp(ast.Not(), node.test)


def _leave_out(node: ast.AST) -> None:
    """The statement becomes ``pass``, where it stands."""
    node.__class__ = ast.Pass  # type: ignore[assignment]
