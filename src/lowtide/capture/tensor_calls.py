"""Calls of torch functions while a model is traced. Notes where in the user's code they are, and answers, or refuses,
calls that a traced tensor would answer otherwise than the real one."""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx import _symbolic_trace
from torch.nn.modules import activation
from torch.overrides import _get_current_function_mode_stack

from lowtide.capture.conversions import CONVERSIONS
from lowtide.capture.foreach import for_each
from lowtide.capture.python_state.guards.reads import Reads
from lowtide.capture.read_numbers import ReadingNumbers, TensorNumbers
from lowtide.capture.trace.answers import READING_ARRAYS, READING_TEXTS, answered, read_by
from lowtide.capture.trace.autocast import Period
from lowtide.capture.trace.classes import GRAD_FN, IS_LEAF, TRACED, is_leaf, refuse_unknown, unregistered
from lowtide.capture.trace.expected import flag_of
from lowtide.capture.trace.lifted import refuse_changed_arrays
from lowtide.capture.trace.origins import note
from lowtide.capture.trace.patches import below, replaced, replaced_methods, wrapped
from lowtide.capture.trace.selected import Selected, by_mask
from lowtide.capture.trace.value_gradients import with_value_gradient
from lowtide.capture.trace.writes import (
    GET_GRADIENT,
    AssignedData,
    GradientRequiredError,
    refuse_gradients,
    refuse_retained,
)
from lowtide.errors import CaptureError
from lowtide.memory.collector import thresholds
from lowtide.objects.places import current
from lowtide.program.distributed.local import has_distributed, is_distributed, local_of
from lowtide.program.source import user_source

_VALUES = (torch.Tensor.tolist, *READING_ARRAYS, *READING_TEXTS)
# Kernels that call operators for which autocast casts. Other operators are composed of such, or cast themselves.
_CASTING_WITHIN = (
    torch.bilinear,
    torch.affine_grid_generator,
    torch.nn.functional.affine_grid,
    torch.linalg.lstsq,
    torch.linalg.pinv,
    torch.pinverse,
    torch._transformer_encoder_layer_fwd,
)
_REQUIRES_GRAD: Any = torch.Tensor.requires_grad
_REQUIRING = (torch.Tensor.requires_grad_, _REQUIRES_GRAD.__set__)
_DESCRIBING = (
    _REQUIRES_GRAD.__get__,
    IS_LEAF,
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim")),
    *(getattr(torch.Tensor, name) for name in ("size", "dim", "numel", "__len__", "is_floating_point")),
)


def compiled_operators_refused() -> contextlib.AbstractContextManager[None]:
    """A context in which ``torch.cond`` and similar operators are refused. They compile their functions, which would
    fail while a model is traced, and for the whole process from then on."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise CaptureError(
            f"the forward pass calls torch.cond, while_loop or the like ({user_source()}), whose branches are programs of "
            "their own. Decide by a Python condition, or run the model in parts."
        )

    owner, name = torch._higher_order_ops.utils, "_hop_compile_and_call"
    return replaced(owner, name, refuse) if hasattr(owner, name) else contextlib.nullcontext()


@contextlib.contextmanager
def told_as_in_eager() -> Iterator[None]:
    """A context in which code gets eager's answers when it asks whether it is traced, whether functions are overridden,
    or how garbage is collected. PyTorch's layers choose their kernels by such questions."""
    disabled = torch._C._disabled_torch_function_impl
    modes: Callable[[], list[Any]] = _get_current_function_mode_stack

    def overrides(one: Any) -> bool:
        own = getattr(type(one), "__torch_function__", disabled)
        return own is not disabled and type(one) not in (torch.Tensor, *TRACED)

    def are_overridden(given: Iterable[Any]) -> bool:
        # Without the mode whose code runs, and without ours.
        theirs = any(not type(mode).__module__.startswith("lowtide.") for mode in modes())
        return torch._C._is_torch_function_enabled() and (theirs or any(map(overrides, given)))

    with (
        replaced(_symbolic_trace, "_is_fx_tracing_flag", False),
        replaced(activation, "_is_make_fx_tracing", lambda: False),
        replaced(torch.overrides, "has_torch_function", are_overridden),
        wrapped(gc, "get_threshold", lambda _: thresholds),
    ):
        yield


class TensorCalls(ReadingNumbers):
    """A mode that records the user's line at each call of a torch function, and the ``period`` of its casts. It records
    in ``reads`` constant tensors whose values become Python numbers, and tensors without a gradient.

    ``state``: tensors that must not be given other data. The gradients of these, of ``others``, and of tensors ``held``
    in attributes belong to the user. ``registered``: the real tensors of ``state`` and ``held``.

    Raises ``GradientRequiredError``, at the end or in place of any other error, if the model makes some of the state or
    others require a gradient, or no longer require one, before anything has read them.
    """

    def __init__(
        self,
        registered: Sequence[torch.Tensor],
        state: Sequence[torch.Tensor],
        others: Sequence[torch.Tensor],
        held: Sequence[torch.Tensor],
        period: Period,
        reads: Reads,
        numbers: TensorNumbers,
    ) -> None:
        super().__init__(numbers)
        self.state, self.given = state, [*state, *others]
        self._lasting = [*zip((*state, *held), registered, strict=True)]
        self._with_gradients = [*self.given, *held]
        self.period = period
        self.reads = reads
        self._assigned = AssignedData(state)
        self.replaced = replaced_methods()
        known = len(state)
        numbered = enumerate(self.given)
        self._numbers = {id(one): number for number, one in numbered if number < known or not is_distributed(one)}
        self._early = set[int]()
        self._read = set[int]()  # ids
        self._selected: list[weakref.ref[Selected]] = []
        self._arrays: list[tuple[np.ndarray, np.ndarray]] = []  # arrays made of tensors, and what they held then

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        if self._early and (kind is None or issubclass(kind, Exception)):
            raise GradientRequiredError(self._early) from error
        for one in self._selected if kind is None else ():
            held = one()
            if held is not None:  # by a result, say
                raise held.why
        if kind is None:
            refuse_changed_arrays(self._arrays)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if id(func) in self.replaced:
            with torch._C.DisableTorchFunction():
                return self.replaced[id(func)](*args, **(kwargs or {}))
        if (calls := for_each(func, args, kwargs or {})) is not None:
            with self:
                return calls()
        calling = sys._getframe(1)
        return self.run(below(func, calling), args, kwargs or {}, calling)

    def run(self, func: Any, args: Any, kwargs: Any, calling: FrameType) -> Any:
        made = super().run(func, args, kwargs, calling)
        if isinstance(made, Selected):
            self._selected.append(weakref.ref(made))
        return made

    def called(self, func: Any, args: Any, kwargs: Any, calling: FrameType) -> Any:
        if self._requires(func, args, kwargs):
            return args[0] if func is torch.Tensor.requires_grad_ else None
        note(source=user_source(), casts=self.period(func, args, kwargs))
        made = by_mask(func, args, kwargs)
        if made is not NotImplemented:
            return made
        if func in _VALUES and not isinstance(args[0], (FakeTensor, FunctionalTensor)):
            self.reads.note("values", args[0], "", current("values", args[0], ""), "the values of a constant tensor")
        if self._assigned.takes(func, args):
            return None
        if func is torch.Tensor._nnz and isinstance(args[0], (FakeTensor, FunctionalTensor)):
            raise CaptureError(
                f"the forward pass asks how many entries a sparse tensor has ({user_source()}), which no plan knows. Pass the "
                "number as an argument, or run the model under lowtide.online."
            )
        if func == GET_GRADIENT and self._has_none(args[0]):
            return None
        if has_distributed():
            _refuse_unregistered((args, kwargs))
        refuse_gradients(func, args, self._with_gradients)
        _refuse_casting(func, args)
        refuse_retained(func, args, self.state)
        if args:
            refuse_unknown(func, calling, args[0], self.given)
        if func in (IS_LEAF, GRAD_FN) and any(args[0] is one for one in self.given):
            leaf = is_leaf(args[0])
            return leaf if func == IS_LEAF else None
        if func is torch.Tensor.item and (number := self.numbers.item(args[0])) is not None:
            return number
        if func is torch.Tensor.__bool__ and flag_of(args[0]) is not None:
            return bool(args[0].detach() != 0)
        if func in CONVERSIONS:
            self.numbers.convert(args[0], calling)
        if (read := read_by(func, args, kwargs)) is not None:
            self._arrays += [(read, read.copy())] if func in READING_ARRAYS else []
            return read
        if func in READING_TEXTS and not isinstance(args[0], FakeTensor):
            return f"tensor(..., size={tuple(args[0].shape)}, dtype={args[0].dtype})"
        if func in READING_ARRAYS:
            raise CaptureError(
                f"the forward pass makes an array of NumPy's of a tensor ({user_source()}), whose values no plan knows. "
                "Compute with torch, or run the model under lowtide.online."
            )
        made = with_value_gradient(func, args, kwargs)
        return answered(func, args, kwargs) if made is None else made

    def _requires(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call changes whether a tensor that nothing has read requires a gradient. Other calls count as
        reads."""
        if func in _REQUIRING:
            number = self._numbers.get(id(args[0]))
            wanted = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
            if number is None or id(args[0]) in self._read:
                return False
            (self._early.discard if wanted == args[0].requires_grad else self._early.add)(number)
            return number in self._early
        if func not in _DESCRIBING:
            for one in (*args, *kwargs.values()):
                self._read.update(map(id, one) if isinstance(one, (list, tuple)) else (id(one),))
        return False

    def _has_none(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is a constant, or stands for a parameter or buffer, that has no gradient. If so, this is
        recorded."""
        real = next((real for traced, real in self._lasting if traced is tensor), None)
        if real is None and not isinstance(tensor, (FakeTensor, FunctionalTensor)):
            real = tensor
        if real is None or real.grad is not None:
            return False
        self.reads.note("gradient", real, "", None, "the gradient of a parameter, a buffer or a constant")
        return True


def _refuse_casting(func: Any, args: Sequence[Any]) -> None:
    """Raise ``CaptureError`` for operators in whose kernels autocast casts: in a plan they run without it."""
    if func not in _CASTING_WITHIN:
        return
    device = next((one.device.type for one in args if isinstance(one, torch.Tensor)), "cpu")
    if torch.is_autocast_enabled(device):
        raise CaptureError(
            f"autocast casts within the kernel of {func.__name__} ({user_source()}), where no plan follows. Call it inside of "
            f"torch.autocast({device!r}, enabled=False), or run the model in parts."
        )


def _refuse_unregistered(given: Any) -> None:
    """Raise ``CaptureError`` for a distributed tensor that requires a gradient but is not an input of the program. Its
    local tensor, which is traced, does not say so."""
    for one in pytree.tree_leaves(given):
        if is_distributed(one) and one.requires_grad and not isinstance(local_of(one), TRACED):
            raise unregistered(one.shape)
