"""Gradients that arrive at a planned call: whether its program was made for them, and their conversion for it."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence

import torch
from torch._C._functorch import is_legacy_batchedtensor

from lowtide.errors import ExecutionError
from lowtide.ir import Op
from lowtide.lower import Lowered
from lowtide.program import Program, layouts
from lowtide.program.results import GradientMask, Result
from lowtide.program.tangents import owns_tangents

_OWN_USES = 2  # references to a storage: the tensor, and the query itself
_NUMBER_BYTES = 64  # largest storage of an expanded number
_CAST = frozenset(f"aten.{name}.default" for name in ("mm", "bmm", "baddbmm", "addmm", "addbmm", "mv", "addmv", "addr"))


def refuse_casts(program: Program, device_type: str) -> None:
    """Raise ``ExecutionError`` if the backward pass runs under autocast and this would change its types: the program
    has the types of a backward pass outside autocast."""
    if not torch.is_autocast_enabled(device_type):
        return
    kept = torch.get_autocast_dtype(device_type), torch.float64
    cast = next((op for op in program.graph.ops[program.graph.forward_ops :] if _is_cast(program, op, kept)), None)
    if cast is not None:
        raise ExecutionError(
            f"backward() is called under autocast, where plain PyTorch casts what {cast.name} of {cast.module or 'the model'} "
            f"multiplies to {kept[0]}, and the plan does not. Call it after the autocast block, as PyTorch recommends."
        )


def _is_cast(program: Program, op: Op, kept: Sequence[torch.dtype]) -> bool:
    if op.target not in _CAST:
        return False
    return any(
        program.metas[value].dtype.is_floating_point and program.metas[value].dtype not in kept for value in op.inputs
    )


def expected(lowered: Lowered, gradients: Sequence[torch.Tensor | None]) -> bool:
    """Whether the program was made for these gradients."""
    program = lowered.program
    present = {i for i, gradient in enumerate(gradients) if gradient is not None}
    arrived = zip(lowered.tangents, (gradients[i] for i in program.tangents), strict=True)
    return present == set(program.tangents) and all(
        gradient is not None and _has_layout(gradient, program.metas[value].stride) for value, gradient in arrived
    )


def _has_layout(gradient: torch.Tensor, stride: Sequence[int]) -> bool:
    return layouts.is_equivalent(gradient.shape, gradient.stride(), stride)


def wanted(program: Program, gradients: Sequence[torch.Tensor | None]) -> GradientMask:
    """The mask for the results of ``program`` whose gradients arrived."""
    return tuple(_wanted(program, result, gradients) for result in program.results[: len(program.mask)])


def _wanted(program: Program, result: Result, gradients: Sequence[torch.Tensor | None]) -> bool | tuple[int, ...]:
    place = result.returned
    gradient = gradients[place] if place is not None and result.requires_grad else None  # none for detached results
    if place is None or gradient is None:
        return False
    stride = program.metas[program.graph.forward_outputs[place]].stride
    usual = gradient.numel() <= 1 or (gradient.is_contiguous() and _has_layout(gradient, stride))
    return usual or tuple(gradient.stride())


def place(result: Result) -> tuple[int | None, ...]:
    return result.returned, result.argument, result.base


def prepared(lowered: Lowered, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """The arriving gradients in the layout that the program was captured with. Conjugation is resolved."""
    found = []
    for value, output in zip(lowered.tangents, lowered.program.tangents, strict=True):
        gradient, meta = gradients[output], lowered.program.metas[value]
        assert gradient is not None
        gradient = gradient.detach()
        if gradient.is_conj() or not _has_layout(gradient, meta.stride):
            arrived, gradient = gradient, layouts.empty(meta)
            once = tuple(slice(None if step else 1) for step in meta.stride)  # expanded dimensions: one element
            gradient[once].copy_(arrived[once])
        found.append(gradient)
    return found


class Tangents:
    """The gradients that arrived at a call, prepared for its program. If the program owns them, they are kept only
    until ``handed``."""

    def __init__(self, lowered: Lowered, gradients: Sequence[torch.Tensor | None]) -> None:
        self._kept: list[torch.Tensor] | None = prepared(lowered, gradients)
        self._known = [(weakref.ref(tensor), tensor._version) for tensor in self._kept]
        self._owned = owns_tangents(lowered.program.graph)

    def handed(self) -> list[torch.Tensor]:
        """Return all gradients, for the program."""
        assert self._kept is not None
        found = self._kept
        if self._owned:
            self._kept = None
        return found

    def keep(self) -> bool:
        """Keep the gradients so that the program can start over. Returns ``False`` if the program has freed or
        overwritten one."""
        found = [one for known, version in self._known if (one := known()) is not None and one._version == version]
        if len(found) < len(self._known):
            return False
        self._kept = found
        return True


def is_held(gradient: torch.Tensor | None) -> bool:
    """Whether other code holds the memory of a gradient, so that it would not be freed with the caller's tensor. Small
    memory never counts."""
    if gradient is None:
        return False
    if type(gradient) is not torch.Tensor or gradient.layout is not torch.strided:
        return True
    if gradient.untyped_storage().nbytes() <= _NUMBER_BYTES:  # an expanded number
        return False
    return torch._C._storage_Use_Count(gradient.untyped_storage()._cdata) > _OWN_USES


def is_held_by_lists(tensors: Sequence[torch.Tensor], place: int, times: int) -> bool:
    """Whether only lists such as ``tensors`` hold the memory of the tensor at ``place``, which occurs ``times`` times
    in them: no variable, other tensor or autograd node does."""
    if type(tensors[place]) is not torch.Tensor or tensors[place].layout is not torch.strided:
        return False
    in_one_list, python, storage = _uses([torch.empty(0)], 0)
    return _uses(tensors, place) == (in_one_list, python + times - 1, storage)


def _uses(tensors: Sequence[torch.Tensor], place: int) -> tuple[int, int, int]:
    """Reference counts of a tensor in C++ and Python, and of its storage, including the query itself."""
    storage = torch._C._storage_Use_Count(tensors[place].untyped_storage()._cdata)
    return tensors[place]._use_count(), sys.getrefcount(tensors[place]), storage  # type: ignore[attr-defined]


def check_arriving(gradients: Sequence[torch.Tensor | None]) -> None:
    """Raise ``ExecutionError`` if the backward pass is differentiated or has batched gradients, which a node cannot
    handle."""
    if torch.is_grad_enabled():  # create_graph=True
        raise ExecutionError(
            "a backward pass through a planned model cannot be differentiated again (create_graph=True: gradient penalties "
            "and the like), where no code around the model's first call names it, or the backward pass of the first call "
            "like this one was not. Have the first step do so, too, call lowtide.restore(model) for that part of the work, or "
            "run it under lowtide.online."
        )
    if any(gradient is not None and is_legacy_batchedtensor(gradient) for gradient in gradients):
        raise ExecutionError(
            "a backward pass through a planned model takes one gradient at a time (is_grads_batched=True, vectorize=True). "
            "Loop over them with retain_graph=True, or call lowtide.restore(model) for that part of the work."
        )
