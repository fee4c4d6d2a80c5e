"""Make a model's results from the outputs of its program.

Each result is an output of its own, so that its gradient arrives separately. The program sums the gradients that arrive
at several views of one tensor, where eager's engine does. Autograd also sees the same as in eager: a result that is a
view is a view of an output, so that a write into it reaches the others. This is decided here and not by the tracer,
because it must not depend on which results a gradient is expected for: a call may continue in a program for other
gradients.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction

from lowtide.program.layouts import memory_of

# For each tensor of the result: no gradient (False), one with the tensor's layout (True), or one with these strides.
GradientMask = tuple[bool | tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class View:
    """A layout in the storage of another tensor, relative to where that begins. Stride and offset are in elements of
    ``dtype``. ``conjugate``, ``negative``: whether numbers are read so where those of the other tensor are not."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    conjugate: bool
    negative: bool

    @classmethod
    def of(cls, tensor: torch.Tensor, source: torch.Tensor) -> View:
        conjugate, negative = tensor.is_conj() != source.is_conj(), tensor.is_neg() != source.is_neg()
        offset = int(tensor.storage_offset()) - _start(source, tensor.dtype)
        return cls(tuple(tensor.shape), tuple(tensor.stride()), offset, tensor.dtype, conjugate, negative)

    def on(self, source: torch.Tensor) -> torch.Tensor:
        """The view of ``source``. One of the two may be complex and the other its real and imaginary parts."""
        tensor = self._laid_out(source)
        tensor = torch.conj(tensor) if self.conjugate else tensor
        return torch._neg_view(tensor) if self.negative else tensor

    def _laid_out(self, source: torch.Tensor) -> torch.Tensor:
        offset = self.offset + _start(source, self.dtype)
        if self.dtype == source.dtype:
            return source.as_strided(self.shape, self.stride, offset)
        if source.is_complex():
            return torch.view_as_real(source).as_strided(self.shape, self.stride, offset)
        stride = (*(2 * step for step in self.stride), 1)
        return torch.view_as_complex(source.as_strided((*self.shape, 2), stride, 2 * offset))


def _start(source: torch.Tensor, dtype: torch.dtype) -> int:
    """The position in its storage at which ``source`` begins, in elements of ``dtype`` (its own type, or the real or
    complex counterpart)."""
    begins = int(source.storage_offset())
    if dtype == source.dtype:
        return begins
    return 2 * begins if source.is_complex() else begins // 2


@dataclass(frozen=True, slots=True)
class Result:
    """One tensor of the model's result.

    ``returned``: its position among the graph's forward outputs, unless it is the flat input ``argument``, or a view of
    that without a gradient. ``view``: set if it is a view of that input, or of the forward output ``base``.
    ``requires_grad``: as in eager.
    """

    requires_grad: bool
    returned: int | None = None
    argument: int | None = None
    base: int | None = None
    view: View | None = None

    def form(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The result, made from the program's outputs and flat inputs."""
        if self.returned is not None:  # several results without a gradient may share an output
            tensor = outputs[self.returned]
            return tensor if self.requires_grad else tensor.detach()
        source = inputs[self.argument or 0]
        tensor = source if self.view is None else self.view.on(source)
        return tensor.detach() if tensor.requires_grad and not self.requires_grad else tensor


def with_views(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], results: Sequence[Result]
) -> list[torch.Tensor]:
    """Return the forward outputs, with those that are views formed as views of their bases."""
    formed = list(outputs)
    for result in results:
        if result.returned is not None and result.view is not None:
            source = outputs[result.base] if result.base is not None else inputs[result.argument or 0]
            formed[result.returned] = result.view.on(source)
    return formed


class Viewed(NamedTuple):
    """What a result is a view of (the ``result`` with this number, or else the input), and how."""

    result: int | None = None
    argument: int | None = None
    view: View | None = None


def outputs_of(
    results: Sequence[torch.Tensor], mask: GradientMask, inputs: Sequence[torch.Tensor]
) -> tuple[tuple[torch.Tensor, ...], tuple[Viewed, ...]]:
    """What a traced model returns, one tensor per result, and what each of these is a view of.

    ``results``: including the ``bases`` of others. ``inputs``: everything that the model was given. Results that are
    inputs, or views of inputs without a gradient, are outputs that share their memory.
    """
    given = {memory_of(tensor): number for number, tensor in enumerate(inputs)}
    sharing = collections.Counter([*given, *map(memory_of, results)])
    numbers = {id(tensor): number for number, tensor in enumerate(results)}
    returned: list[torch.Tensor] = []
    viewed: list[Viewed] = []
    for result, entry in zip(results, mask, strict=True):
        argument, base = _argument(result, inputs, given), _base(result)
        source = None if argument is None else inputs[argument]
        if source is not None and (result is source or not result.requires_grad):
            returned.append(result if result is source else result.detach())
        else:
            returned.append(_apart(result, entry) if sharing[memory_of(result)] > 1 else _expecting(result, entry))
        if source is not None:
            viewed.append(Viewed(None, argument, None if result is source else View.of(result, source)))
        elif base is not None and id(base) in numbers:
            viewed.append(Viewed(numbers[id(base)], None, View.of(result, base)))
        else:
            viewed.append(Viewed())
    return tuple(returned), tuple(viewed)


def bases(results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that several results are views of and that are not results themselves."""
    given = {memory_of(tensor) for tensor in inputs}
    found = [_base(tensor) for tensor in results if memory_of(tensor) not in given]
    times = collections.Counter(id(base) for base in found)
    known = {id(tensor) for tensor in results}
    return list({id(b): b for b in found if b is not None and times[id(b)] > 1 and id(b) not in known}.values())


def _argument(result: torch.Tensor, inputs: Sequence[torch.Tensor], given: Mapping[int, int]) -> int | None:
    """Return the number of the input that a result is or views; ``None`` if a custom backward lies between the two."""
    own = next((number for number, tensor in enumerate(inputs) if tensor is result), given.get(memory_of(result)))
    return None if own is None or _is_of_function(result, inputs[own]) else own


def _base(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor that this one is a view of, if a gradient passes between them as through a view, or if its numbers are
    read otherwise. All other views without a gradient are views in the program."""
    base = tensor._base
    if base is None:
        return None
    lazy = tensor.is_conj() != base.is_conj() or tensor.is_neg() != base.is_neg()
    if not (lazy or (tensor.requires_grad and base.requires_grad)) or _is_of_function(tensor, base):
        return None
    return base


def _is_of_function(tensor: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether the gradient passes through a ``torch.autograd.Function`` on its way to ``source``, the base of the
    view."""
    between = set() if tensor is source else below([tensor], below([source]))
    return any(isinstance(node, BackwardCFunction) or type(node).__name__ == "CppFunction" for node in between)


def _apart(tensor: torch.Tensor, entry: bool | tuple[int, ...]) -> torch.Tensor:
    """The same tensor for the program (``capture.convert``), but for the tracer in memory of its own, like its
    gradient: by default without the gaps of a view."""
    copy = torch.ops.aten.alias_copy.default(tensor)
    dense = tuple(torch.empty_like(tensor).stride())
    return _expecting(copy, dense if entry is True and dense != copy.stride() else entry)


def _expecting(tensor: torch.Tensor, entry: bool | tuple[int, ...]) -> torch.Tensor:
    if entry is False:
        return tensor.detach()
    if entry is True and not tensor.is_conj():
        return tensor

    def arriving(gradient: torch.Tensor) -> torch.Tensor:
        plain = gradient.conj() if gradient.is_conj() else gradient  # ``capture.convert`` takes it for the tangent
        return plain if entry is True else plain.as_strided(plain.shape, entry)

    # A separate node, so that the hook sees only the gradient that arrives from outside.
    result: torch.Tensor = torch.ops.aten.alias.default(tensor)
    result.register_hook(arriving)  # type: ignore[no-untyped-call]
    return result


def below(results: Sequence[torch.Tensor], known: Collection[Any] = frozenset()) -> set[Any]:
    """Return the autograd nodes that the results depend on, without those ``known`` with all below them."""
    return below_nodes((result.grad_fn for result in results), known)


def below_nodes(nodes: Iterable[Any], known: Collection[Any] = frozenset()) -> set[Any]:
    """Return these nodes and those that they depend on, without those ``known`` with all below them."""
    found: set[Any] = set()
    waiting: list[Any] = [*nodes]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found and node not in known:
            found.add(node)
            waiting += [child for child, _ in node.next_functions]
    return found


def unreached(inputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return the numbers of inputs that require a gradient and that no result depends on differentiably."""
    asked = {i: one for i, one in enumerate(inputs) if one.requires_grad}
    known = below([result for result in results if result.requires_grad]) if asked else set()
    return tuple(i for i, one in asked.items() if torch.autograd.graph.get_gradient_edge(one).node not in known)
