"""Symbolic sizes: one trace for calls of many shapes.

The dimensions that vary from call to call are symbols of PyTorch's ``ShapeEnv``. So are the numbers of rows that data
select (by a mask). Sizes computed from them are expressions. When Python code or an operator asks about a size, it gets
the answer of the traced call, and this answer becomes a condition on the sizes of other calls.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch._dynamo.source import LocalSource
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP, DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.printers import PythonPrinter

from lowtide.errors import CaptureError

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
Shapes = Sequence[Sequence[int]]  # of the tensors of a call, by ``extents``
Place = tuple[int, int]  # tensor of the call, index in its extents


class SymbolicSizes:
    """The sizes at the ``varying`` places of a call's tensors, as symbols. Sizes that are equal in the traced call
    share a symbol, unless ``apart``."""

    def __init__(self, varying: Collection[Place], apart: bool = False) -> None:
        self.varying = sorted(varying)
        self.apart = apart
        self.environment: Any = None
        self.expressions: dict[Place, sympy.Expr] = {}
        self.traced: dict[sympy.Symbol, int] = {}  # value of each symbol in the traced call
        self._selected: dict[Any, Any] = {}  # numbers of rows, by their keys

    def begin(self) -> Any:
        self.expressions, self.traced, self._selected = {}, {}, {}
        self.environment = ShapeEnv(
            duck_shape=not self.apart, specialize_zero_one=True, allow_dynamic_output_shape_ops=False
        )
        return self.environment

    def fake(self, mode: Any, tensor: torch.Tensor, number: int) -> torch.Tensor:
        """The fake tensor for the call's tensor with this number."""
        varying, dims = {at for index, at in self.varying if index == number}, range(tensor.dim())
        if not varying:
            fake: torch.Tensor = mode.from_tensor(tensor, static_shapes=True)
            return fake
        if tensor._is_view() and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg()):
            alone = torch.empty(0, dtype=tensor.dtype, device=tensor.device)  # the base has sizes of its own
            tensor = alone.set_(tensor.untyped_storage(), 0, tensor.shape, tensor.stride())
        sizes = [DimDynamic.DUCK if dim in varying else DimDynamic.STATIC for dim in dims]
        strides = [DimDynamic.DUCK if len(dims) + dim in varying else DimDynamic.INFER_STRIDE for dim in dims]
        fake = mode.from_tensor(
            tensor,
            static_shapes=False,
            source=LocalSource(f"tensor{number}"),
            symbolic_context=StatelessSymbolicContext(
                dynamic_sizes=sizes,
                dynamic_strides=strides,
                constraint_sizes=[None] * tensor.dim(),
                constraint_strides=[None] * tensor.dim(),
                specialize_on=None,
            ),
        )
        if not tensor.is_contiguous():  # its other strides are symbols too
            varying.update(len(dims) + dim for dim in dims)
        for at in sorted(varying):
            self.expressions[number, at] = self._varies((*fake.shape, *fake.stride())[at])
        return fake

    def selected(self, real: torch.Tensor, known: Any) -> tuple[Any, ...]:
        """The shape of ``real``, whose number of rows depends on data: one symbol per ``known`` key."""
        rows = self._selected.get(known)
        if rows is None:
            source = LocalSource(f"selected{len(self._selected)}")
            symbol = self.environment.create_symbol(len(real), source=source, dynamic_dim=DimDynamic.DYNAMIC)
            rows = self.environment.create_symintnode(symbol, hint=len(real), source=source)
            self._selected[known] = rows
            self._varies(rows)
        return rows, *real.shape[1:]

    def _varies(self, size: Any) -> sympy.Expr:
        found = expression(size)
        if found.is_Symbol:
            self.traced[found] = hint(size)
        return found

    def are_fixed(self) -> bool:
        """Whether the conditions leave each symbol only one possible value."""
        ranges = self.environment.var_to_range
        return all(ranges[symbol].lower == ranges[symbol].upper for symbol in self.traced)

    def conditions(self) -> list[sympy.Expr]:
        """What was asked about the symbols, with the answers, and the bounds of their ranges."""
        environment = self.environment
        if environment.deferred_runtime_asserts:
            raise CaptureError("sizes depend on the values of tensors")
        asked = [guard.expr for guard in environment.guards]
        bounds: list[sympy.Expr] = []
        for symbol in sorted(self.traced, key=str):
            known = environment.var_to_range[symbol]
            bounds += [sympy.Ge(symbol, known.lower)]
            bounds += [sympy.Le(symbol, known.upper)] if known.upper != int_oo else []
        return [one for one in dict.fromkeys([*asked, *bounds]) if one is not sympy.true]


def extents(tensor: torch.Tensor) -> tuple[int, ...]:
    """The sizes of a call's tensor, and its strides unless it is contiguous."""
    if tensor.is_nested:
        return ()
    return (*tensor.shape, *(() if tensor.is_contiguous() else tensor.stride()))


def expression(value: Any) -> sympy.Expr:
    return value.node.expr if isinstance(value, SYMBOLIC) else sympy.sympify(value)


def compiled(expressions: Iterable[sympy.Expr], symbols: Sequence[sympy.Symbol]) -> Callable[..., list[Any]]:
    """A function from the values of the symbols to the values of the expressions."""
    printer = PythonPrinter()
    names = [str(symbol) for symbol in symbols]
    code = f"lambda {', '.join(names)}: [{', '.join(printer.doprint(one) for one in expressions)}]"
    function: Callable[..., list[Any]] = eval(code, dict(SYMPY_INTERP))
    return function


def values_of(shapes: Shapes, expressions: Mapping[Place, sympy.Expr]) -> dict[sympy.Symbol, int] | None:
    """The value of each symbol in a call with tensors of these shapes; ``None`` if sizes that must be equal differ."""
    values: dict[sympy.Symbol, int] = {}
    for (number, at), one in expressions.items():
        if one.is_Symbol and values.setdefault(one, shapes[number][at]) != shapes[number][at]:
            return None
    follow = ((one, shapes[number][at]) for (number, at), one in expressions.items() if not one.is_Symbol)
    return values if all(one.xreplace(values) == size for one, size in follow) else None


def hint(value: Any) -> Any:
    """The value that a symbolic number has in the traced call; any other value unchanged."""
    return value.node.hint if isinstance(value, SYMBOLIC) else value


def hints(values: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(map(hint, values))


def hashable(value: Any) -> Any:
    """The value, or a text that identifies a symbolic number."""
    return str(value) if isinstance(value, SYMBOLIC) else value


def in_symbols(shape: Sequence[Any], strides: Sequence[int]) -> tuple[Any, ...]:
    """The ``strides`` of a dense tensor of the traced call, written in the sizes of its ``shape`` if any of these is a
    symbol.

    The strides of an empty tensor are returned unchanged. Raises ``CaptureError`` if the strides are no permutation of
    the dimensions.
    """
    if 0 in hints(shape) or not any(isinstance(size, SYMBOLIC) for size in shape):
        return tuple(strides)
    found: list[Any] = list(strides)
    step: Any = 1
    for dim in sorted(range(len(strides)), key=lambda dim: (strides[dim], hint(shape[dim]), -dim)):
        found[dim] = step
        step = step * shape[dim]
    if hints(found) != tuple(strides):
        raise CaptureError(f"strides of {tuple(strides)} for a shape of {tuple(shape)} are no order of dimensions")
    return tuple(found)
