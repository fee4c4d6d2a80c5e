"""A fake tensor mode that knows the answers to questions about masks and positions.

Models ask data-dependent questions about integer inputs ("is this mask all ones?"). Plain fake tensors cannot answer,
and a model that is told that it is compiled takes another path than eager does. So this mode records how each fake
tensor was computed that derives only from constants and from integer or boolean inputs; this gives its real value
(``KnownValues``). A question is answered from that value and recorded as a ``Question``. Later calls ask it again about
their own inputs; another answer needs another program. Questions about floating-point activations or fresh random
numbers cannot be answered and raise ``CaptureError``.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    _BypassDispatchCache,
)

from lowtide.capture.trace import fake_kernels as fakes
from lowtide.capture.trace import results
from lowtide.capture.trace.expected import (
    COMPARISONS,
    QUESTIONS,
    Expectations,
    all_of,
    flag_of,
    fold_uniform,
    is_uniform,
    note_expected,
)
from lowtide.capture.trace.known_values import KnownValues, elements, is_unknown
from lowtide.capture.trace.questions import Provenance, Question
from lowtide.capture.trace.real_strides import real_strides, tensors_among, with_strides
from lowtide.capture.trace.sizes import SYMBOLIC, SymbolicSizes, hashable, in_symbols
from lowtide.errors import CaptureError
from lowtide.program.layouts import copies_storage
from lowtide.program.source import user_source

_ATEN = torch.ops.aten
_MAXIMUM_ELEMENTS = 1 << 24
_INDEXING = (_ATEN.index.Tensor, _ATEN.index_put.default, _ATEN.index_put_.default)
_MASKS = (torch.bool, torch.uint8)
UNINITIALISED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}


class AnsweringFakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A mode of fake tensors whose known values answer data-dependent questions. ``questions``: those asked so far whose
    answers depend on the call's inputs."""

    def __init__(
        self, sizes: SymbolicSizes | None = None, expected: Sequence[bool | None] | None = None, rehearses: bool = False
    ) -> None:
        super().__init__(allow_non_fake_inputs=True, shape_env=None if sizes is None else sizes.begin())
        self.sizes = sizes
        self.expectations = Expectations(expected)
        self.rehearses = rehearses  # so that nothing is traced, and nobody else answers
        self.questions: list[Question] = []
        self._seen: set[Any] = set()
        self._interned: dict[Any, Provenance] = {}
        self._constants: dict[int, tuple[torch.Tensor, Provenance]] = {}  # by id, which lasts as long as the tensor
        self.values = KnownValues()
        self._answering: list[weakref.ref[torch.Tensor]] = []
        self.kept_results: dict[Any, Any] = {}  # of symbolic sizes, see ``results``
        self.cache_enabled = sizes is None  # PyTorch's own, which takes long there
        self._depth = 0  # of operators that their fake kernels are made of

    def forget_values(self) -> None:
        """Free the known values, and weak references to real tensors: a tensor with such references cannot be swapped, and
        objects of a finished trace wait in reference cycles for Python's collector."""
        self.fake_tensor_converter.meta_converter.describer.lookup_tensor.clear()
        self.values.clear()
        for ref in self._answering:
            fake = ref()
            if fake is not None and hasattr(fake, "_lowtide_known"):
                del fake._lowtide_known

    def register_input(self, fake: torch.Tensor, real: torch.Tensor, position: int, state: bool) -> None:
        """Let ``fake`` (integers, booleans, or a single number on the CPU that is no ``state`` of the model) answer with the
        value of ``real``."""
        number = real.dim() == 0 and real.device.type == "cpu" and not state and not real.requires_grad
        if real.is_complex() or (real.is_floating_point() and not number) or real.device.type == "meta":
            return
        known = self._intern(("input", position), Provenance(leaf=position, depends_on_input=True))
        self.values.give(known, real)
        self._attach(fake, known)

    def dispatch(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        self._depth += 1
        try:
            return self._dispatched(func, types, args, dict(kwargs or {}))
        finally:
            self._depth -= 1

    def _dispatched(self, func: Any, types: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if func in COMPARISONS and self.rehearses:
            with self:
                return all_of(func, args, kwargs)
        if func in QUESTIONS:
            return self._answer(func, args, kwargs)
        known = self._known_result(func, args, kwargs)
        if func is _ATEN.bernoulli.p and is_empty(args[0]):
            return super().dispatch(_ATEN.empty_like.default, types, args[:1], {})  # see targets.bernoulli
        if func is _ATEN._grouped_mm.default and args[0].dtype is not torch.bfloat16:
            with self:
                return fakes.grouped_mm(*args, **kwargs)
        if func is _ATEN._ctc_loss.Tensor:
            return self._ctc_loss(args)
        if func is _ATEN._ctc_loss.default:
            with self:
                return fakes.ctc_loss(args[0], max(args[3]))
        if func in (_ATEN._ctc_loss_backward.Tensor, _ATEN._ctc_loss_backward.default):
            with self:
                return fakes.ctc_loss_backward(args[1])
        if func in fakes.RESIZED_BACKWARD and self.shape_env is not None:
            with self:
                return fakes.resized_backward(*args)
        key = None if known is not None else results.key_of(self, func, args, kwargs)
        result = None if key is None else results.known(self, key, args)
        if result is None:
            result = self._computed(func, types, args, kwargs, known)
            if known is not None:
                self._attach_results(result, known)
                return result
            if key is not None:
                results.keep(self, key, args, result)
        return self._described(func, args, result)

    def _computed(
        self, func: Any, types: Any, args: Sequence[Any], kwargs: dict[str, Any], known: Provenance | None
    ) -> Any:
        """Run the fake kernel, and give its results the layouts that the real kernel returns."""
        if func in _INDEXING:
            args = [args[0], [self._with_value(one) for one in args[1]], *args[2:]]
        try:
            if func is _ATEN.expand.default and self.shape_env is not None:
                with self:
                    result: Any = fakes.expanded(*args)
            else:
                with enable_python_dispatcher() if self.shape_env is not None else contextlib.nullcontext():
                    result = super().dispatch(func, types, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            if known is not None:
                result = self._concrete_result(func, known)
            elif func is _ATEN.nonzero.default and self.rehearses:
                with self:  # of a mask that the trace goes without (``selected``)
                    return args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.int64)
            else:
                raise unanswerable(func) from error
        if known is not None:
            return result
        if func in fakes.NORMS:
            with self:
                result = fakes.norm_statistics(func, args, result)
        strides = real_strides(func, args, kwargs, result)
        return result if strides is None else with_strides(func, result, strides, self)

    def _with_value(self, index: Any) -> Any:
        """Attach the known value to a mask that is used as an index: a fake kernel asks how many elements it selects."""
        known = self._known_tensor(index) if type(index) is torch.Tensor and index.dtype in _MASKS else None
        if known is None:
            return index
        fake = self.from_tensor(index)
        self._attach(fake, known)
        return fake

    def _described(self, func: Any, args: Sequence[Any], result: Any) -> Any:
        """Attach to a result what is known about its values."""
        note_expected(func, args, result)
        if isinstance(result, FakeTensor) and isinstance(func, torch._ops.OpOverload):
            result._lowtide_uniform = is_uniform(func, args, result)  # type: ignore[attr-defined]
            result._lowtide_empty = func._schema.name.split("::")[1] in UNINITIALISED  # type: ignore[attr-defined]
            if is_empty(result) and self._depth == 1:  # no fake kernel's, which tells nothing of values
                self._attach_zeros(result)
        return result

    def _validate_cache_key(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        super()._validate_cache_key(func, args, kwargs)
        if copies_storage(func):  # PyTorch's cache of results knows neither the size of their storages nor an offset
            raise _BypassDispatchCache("copies a storage")

    def _answer(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        known = self._known_result(func, args, kwargs)
        if known is None:
            answer = flag_of(args[0]) if self.rehearses else None
            answer = self.expectations.next_answer(args[0]) if self.rehearses and answer is None else answer
            if answer is None:
                raise unanswerable(func)
            return answer
        real = self.values.of(known)
        if known.depends_on_input:
            subject = known.args[0] if func is _ATEN._local_scalar_dense.default else known
            self._remember(subject, "item" if subject is not known else "bool", real)
        return real

    def _concrete_result(self, func: Any, known: Provenance) -> Any:
        """The result of an operator whose shape depends on known data. The shape becomes a question."""
        real = self.values.of(known)
        if isinstance(real, tuple) and all(isinstance(one, torch.Tensor) for one in real):
            each = [self._intern((known, place), replace(known, output=place)) for place in range(len(real))]
            return tuple(self._concrete_result(func, one) for one in each)
        if not isinstance(real, torch.Tensor):
            raise unanswerable(func)
        shape = real.shape if self.sizes is None or not known.positions() else self.sizes.selected(real, known)
        with self:  # a new tensor each time, as in eager
            fake = torch.empty_strided(shape, in_symbols(shape, real.stride()), dtype=real.dtype, device=real.device)
        fake._lowtide_empty = False  # type: ignore[attr-defined]
        if known.depends_on_input:
            self._remember(known, "shape", tuple(fake.shape))
        return fake

    def _ctc_loss(self, args: Sequence[Any]) -> Any:
        """The result of a CTC loss. Its table's size depends on the longest target, which becomes a question."""
        longest = torch.ops.aten.max.default
        known = self._known_result(longest, (args[3],), {})
        if known is None:
            raise unanswerable(_ATEN._ctc_loss.Tensor)
        longest_target = int(self.values.of(known))
        if known.depends_on_input:
            self._remember(known, "item", longest_target)
        with self:
            return fakes.ctc_loss(args[0], longest_target)

    def _remember(self, known: Provenance, ask: str, answer: Any) -> None:
        key = (known, ask)
        if key not in self._seen:
            self._seen.add(key)
            self.questions.append(Question(known, ask, answer, user_source()))

    def _known_result(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Provenance | None:
        """How the result of ``func`` is computed, if the values of all tensor arguments are known; else ``None``."""
        folded = None if is_unknown() else fold_uniform(func, args)
        if folded is not None:
            return Provenance(constant=folded)
        if not isinstance(func, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded in func.tags:
            return None
        if func._schema.name.split("::")[1] in UNINITIALISED or func.namespace not in ("aten", "prims"):
            return None
        if any(type(one) is FakeTensor and not hasattr(one, "_lowtide_known") for one in tensors_among(args)):
            return None  # most operators
        flat, spec = pytree.tree_flatten((tuple(args), kwargs))
        knowns = [self._known_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in flat]
        if any(known is None and isinstance(leaf, torch.Tensor) for known, leaf in zip(knowns, flat, strict=True)):
            return None
        if not any(isinstance(leaf, torch.Tensor) for leaf in flat) and not _small_factory(args):
            return None
        if func._schema.is_mutable:
            _forget(flat)
            return None
        if is_unknown():
            return None
        depends = any(
            known.depends_on_input if isinstance(known, Provenance) else isinstance(known, SYMBOLIC) for known in knowns
        )
        keys = [known if isinstance(known, Provenance) else (type(known), hashable(known)) for known in knowns]
        known_args, known_kwargs = pytree.tree_unflatten(knowns, spec)
        fresh = Provenance(func, known_args, known_kwargs, depends_on_input=depends)
        return self._intern((func, tuple(keys), spec), fresh)

    def _known_tensor(self, tensor: torch.Tensor) -> Provenance | None:
        if isinstance(tensor, FakeTensor):
            return getattr(tensor, "_lowtide_known", None)
        if type(tensor) is torch.Tensor and tensor.numel() <= _MAXIMUM_ELEMENTS and tensor.device.type != "meta":
            # Its values may change in place, so the tensor itself is kept.
            constant = Provenance(constant=tensor, depends_on_input=True)
            return self._constants.setdefault(id(tensor), (tensor, constant))[1]
        return None

    def _intern(self, key: Any, known: Provenance) -> Provenance:
        try:
            return self._interned.setdefault(key, known)
        except TypeError:  # an unhashable argument: not shared
            return known

    def _attach_zeros(self, fake: FakeTensor) -> None:
        """Attach zeros to integers and booleans in memory that was not written yet. No defined program reads them before it
        has overwritten them, and after partial writes the values are known only if the whole is."""
        if (
            fake.dtype.is_floating_point
            or fake.dtype.is_complex
            or any(isinstance(size, SYMBOLIC) for size in fake.shape)
        ):
            return
        if fake.numel() <= _MAXIMUM_ELEMENTS:
            shape = tuple(fake.shape)
            self._attach(
                fake, self._intern((shape, fake.dtype), Provenance(torch.zeros, (shape,), {"dtype": fake.dtype}))
            )

    def _attach_results(self, result: Any, known: Provenance) -> None:
        if isinstance(result, FakeTensor):
            if elements(result) <= _MAXIMUM_ELEMENTS:
                self._attach(result, known)
                self.values.made(known, result)
        elif isinstance(result, (tuple, list)):
            for index, fake in enumerate(result):
                if isinstance(fake, FakeTensor):
                    self._attach_results(fake, self._intern((known, index), replace(known, output=index)))

    def _attach(self, fake: torch.Tensor, known: Provenance) -> None:
        fake._lowtide_known = known  # type: ignore[attr-defined]
        self._answering.append(weakref.ref(fake))


def _forget(leaves: Sequence[Any]) -> None:
    """Forget the values of tensors that are written in place."""
    for leaf in leaves:
        if isinstance(leaf, FakeTensor) and hasattr(leaf, "_lowtide_known"):
            del leaf._lowtide_known


def is_empty(fake: torch.Tensor) -> bool:
    """Whether the tensor's memory has not been written since it was allocated."""
    return getattr(fake, "_lowtide_empty", False)


def _small_factory(args: Sequence[Any]) -> bool:
    """Whether a constant made from numbers alone has a reasonable size."""
    return not args or not isinstance(args[0], (list, tuple)) or math.prod(args[0]) <= _MAXIMUM_ELEMENTS


def unanswerable(func: Any) -> CaptureError:
    source = user_source()
    place = f" at {source}" if source else ""
    return CaptureError(
        f"the program depends on the values of floating-point or random tensors ({func}{place}), so it cannot be "
        "captured as one graph. Make the decision independent of the data (a mask or lengths among the arguments may be read "
        "where they are integers or booleans), or run the model under lowtide.online.",
        source=source,
        selects=torch.Tag.dynamic_output_shape in func.tags,
    )
