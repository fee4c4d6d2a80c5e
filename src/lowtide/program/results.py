"""How a model's results come from the outputs of its program.

Results may share memory: they are views of each other, or one is another one detached. Outputs do not, as far as autograd can
see: what several results are views of is one output, which they are formed from after each call, so that a gradient for any of
them, and a write into it, reach the others as in eager. That is settled here and not by AOTAutograd, since it must not depend
on which of the results a gradient is expected for: a call may go on in a program for others.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd.function import BackwardCFunction

# Per tensor of the result: no gradient (False), one in the layout of the tensor (True), or one with these strides.
GradientMask = tuple[bool | tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class View:
    """A layout in the storage of another tensor; stride and offset in elements of its own ``dtype``. ``conjugate`` and
    ``negative``: its numbers are read so, where those of the other tensor are not."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    conjugate: bool
    negative: bool

    @classmethod
    def of(cls, tensor: torch.Tensor, source: torch.Tensor) -> View:
        conjugate, negative = tensor.is_conj() != source.is_conj(), tensor.is_neg() != source.is_neg()
        layout = tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())
        return cls(*layout, tensor.dtype, conjugate, negative)

    def on(self, source: torch.Tensor) -> torch.Tensor:
        """The view of ``source``, which may be complex where this is of its parts, and the other way round."""
        tensor = self._laid_out(source)
        tensor = torch.conj(tensor) if self.conjugate else tensor
        return torch._neg_view(tensor) if self.negative else tensor

    def _laid_out(self, source: torch.Tensor) -> torch.Tensor:
        if self.dtype == source.dtype:
            return source.as_strided(self.shape, self.stride, self.offset)
        if source.is_complex():
            return torch.view_as_real(source).as_strided(self.shape, self.stride, self.offset)
        stride = (*(2 * step for step in self.stride), 1)
        return torch.view_as_complex(source.as_strided((*self.shape, 2), stride, 2 * self.offset))


@dataclass(frozen=True, slots=True)
class Result:
    """One tensor of the model's result.

    ``returned``: its position among the graph's forward outputs; or ``argument``: the flat input that it is or views; or
    ``base``: the forward output that it views. ``view`` is there where it is a view. ``requires_grad`` as in eager.
    """

    requires_grad: bool
    returned: int | None = None
    argument: int | None = None
    base: int | None = None
    view: View | None = None

    @property
    def output(self) -> int | None:
        """The forward output that it is or views."""
        return self.base if self.returned is None else self.returned

    def form(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """It, from what the program returned and from its flat inputs."""
        source = outputs[self.output] if self.output is not None else inputs[self.argument or 0]
        tensor = source if self.view is None else self.view.on(source)
        return tensor.detach() if tensor.requires_grad and not self.requires_grad else tensor


@dataclass(frozen=True)
class Outputs:
    """What a traced model returns: ``tensors``, and for each of its results the one of them that it is or views."""

    tensors: tuple[torch.Tensor, ...]
    places: tuple[tuple[int, View | None], ...]

    @classmethod
    def of(cls, results: Sequence[torch.Tensor], mask: GradientMask, inputs: Sequence[torch.Tensor]) -> Outputs:
        """``inputs``: all that the model was given. Results that are among them, or view one, are outputs of their own, which
        AOTAutograd recognises; no gradient for those comes to the program."""
        given = {_storage(tensor): tensor for tensor in inputs}
        viewed = [_viewed(tensor, given) for tensor in results]
        roots = _roots(results, [source is not None for source in viewed])
        numbers: dict[int, int] = {}
        returned: list[torch.Tensor] = []
        places: list[tuple[int, View | None]] = []
        own = {id(tensor) for tensor in inputs}
        distinct = {id(root): root for root in roots}.values()
        sharing = collections.Counter([*given, *map(_storage, distinct)])
        for result, root, source in zip(results, roots, viewed, strict=True):
            if id(root) not in numbers:
                numbers[id(root)] = len(returned)
                if source is not None:
                    returned.append(root if id(root) in own else root.detach())
                else:
                    alone = sharing[_storage(root)] == 1
                    hidden = root if alone else torch.ops.aten._unsafe_view.default(root, root.shape)
                    returned.append(_expecting(hidden, _entry(root, results, roots, mask)))
            above = root if source is None else source
            places.append((numbers[id(root)], None if result is above else View.of(result, above)))
        return cls(tuple(returned), tuple(places))


def _viewed(result: torch.Tensor, given: Mapping[int, torch.Tensor]) -> torch.Tensor | None:
    """The input that a result is or views. Not where the way from the one to the other has a backward of its own."""
    source = given.get(_storage(result))
    return None if source is None or _is_of_function(result, source) else source


def _roots(results: Sequence[torch.Tensor], views_input: Sequence[bool]) -> list[torch.Tensor]:
    """Per result, the tensor to return for it: itself, or the one that it and others are views of. The views of one call that
    makes many (``chunk``) are returned each by itself where there are no others: none of them can be written to."""
    able = [tensor.requires_grad and not views for tensor, views in zip(results, views_input, strict=True)]
    together = _counted(results, able)
    linked = [
        is_able and together[_storage(tensor)] > 1 and not _is_of_function(tensor, _base(tensor))
        for tensor, is_able in zip(results, able, strict=True)
    ]
    free = _counted(results, [is_linked and not _is_of_many(t) for t, is_linked in zip(results, linked, strict=True)])
    roots = [
        _base(tensor) if is_linked and free[_storage(tensor)] > 1 else tensor
        for tensor, is_linked in zip(results, linked, strict=True)
    ]
    leading: dict[Any, torch.Tensor] = {}  # for those without a gradient
    for tensor, root, is_able in zip(results, roots, able, strict=True):
        if is_able:
            leading.setdefault((_storage(tensor), tensor.dtype), root)
    return [
        root if tensor.requires_grad or views else leading.get((_storage(tensor), tensor.dtype), root)
        for tensor, root, views in zip(results, roots, views_input, strict=True)
    ]


def _counted(results: Sequence[torch.Tensor], chosen: Sequence[bool]) -> collections.Counter[int]:
    """How many of the results are in each storage, of those that are chosen."""
    return collections.Counter(_storage(tensor) for tensor, counts in zip(results, chosen, strict=True) if counts)


def _entry(
    root: torch.Tensor, results: Sequence[torch.Tensor], roots: Sequence[torch.Tensor], mask: GradientMask
) -> bool | tuple[int, ...]:
    """The mask's entry for what is returned for several results."""
    members = zip(results, roots, mask, strict=True)
    wanted = [(result, entry) for result, other, entry in members if other is root and entry is not False]
    return next((entry for result, entry in wanted if result is root), bool(wanted))


def _base(tensor: torch.Tensor) -> torch.Tensor:
    base = tensor._base
    return base if base is not None and base.requires_grad else tensor


def _is_of_many(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FunctionalTensor) and bool(
        torch._functionalize_is_multi_output_view(tensor.elem)  # type: ignore[attr-defined]
    )


def _is_of_function(tensor: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether the gradient passes through a ``torch.autograd.Function`` on its way to ``source``, which it is a view of."""
    between = set() if tensor is source else below([tensor], below([source]))
    return any(isinstance(node, BackwardCFunction) or type(node).__name__ == "CppFunction" for node in between)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _expecting(tensor: torch.Tensor, entry: bool | tuple[int, ...]) -> torch.Tensor:
    if entry is False:
        return tensor.detach()
    if entry is True:
        return tensor
    # A layer of its own, so that the hook sees just the gradient that arrives from outside.
    result: torch.Tensor = torch.ops.aten.alias.default(tensor)
    result.register_hook(lambda gradient: gradient.as_strided(gradient.shape, entry))  # type: ignore[no-untyped-call]
    return result


def below(results: Sequence[torch.Tensor], known: Collection[Any] = frozenset()) -> set[Any]:
    """The nodes of the autograd graph that these depend on, beside those that are known with all below them."""
    found: set[Any] = set()
    waiting: list[Any] = [result.grad_fn for result in results]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found and node not in known:
            found.add(node)
            waiting += [child for child, _ in node.next_functions]
    return found
