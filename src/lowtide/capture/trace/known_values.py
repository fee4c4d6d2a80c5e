"""Real values of tensors that derive only from constants and from integer or boolean inputs, while a call is traced.

Models make masks as large as activations, but ask questions about few of them. So small values are kept, and larger
ones are computed on demand from how they were made. This keeps a capture within a training step small.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._mode_utils import no_dispatch

from lowtide.capture.trace.classes import fake_of
from lowtide.capture.trace.questions import Provenance
from lowtide.capture.trace.sizes import SYMBOLIC, hint

_UNKNOWN: contextvars.ContextVar[bool] = contextvars.ContextVar("unknown", default=False)
_SMALL_BYTES = 1 << 14
_RECENT_BYTES = 1 << 20  # total bytes of larger values that are kept after use


@contextlib.contextmanager
def unknown() -> Iterator[None]:
    """A context in which results of operators count as unknown: they depend on something that differs in each call."""
    token = _UNKNOWN.set(True)
    try:
        yield
    finally:
        _UNKNOWN.reset(token)


def is_unknown() -> bool:
    return _UNKNOWN.get()


class KnownValues:
    """The values of known tensors in the call that is traced; see ``of``."""

    def __init__(self) -> None:
        self._small: dict[Provenance, Any] = {}
        self._recent: OrderedDict[Provenance, torch.Tensor] = OrderedDict()

    def give(self, known: Provenance, real: torch.Tensor) -> None:
        """Set the value of an input."""
        self._small[known] = real

    def made(self, known: Provenance, fake: torch.Tensor) -> None:
        """Note that an operator has made ``fake``."""
        if _bytes(fake) <= _SMALL_BYTES and all(map(self._is_at_hand, known.parents())):
            self.of(known)

    def of(self, known: Provenance) -> Any:
        if self._is_at_hand(known):
            return self._at_hand(known)
        with contextlib.ExitStack() as stack:  # in the same state as inside an operator, wherever it is asked
            for context in (no_dispatch, torch.no_grad, torch._C._DisableAutocast, torch._C.DisableTorchFunction):
                stack.enter_context(context())
            real = self._computed(known)
        self._keep(known, real)
        return real

    def clear(self) -> None:
        self._small.clear()
        self._recent.clear()

    def _is_at_hand(self, known: Provenance) -> bool:
        return known.constant is not None or known in self._small or known in self._recent

    def _at_hand(self, known: Provenance) -> Any:
        if known.constant is not None:
            return known.constant
        if known in self._small:
            return self._small[known]
        self._recent.move_to_end(known)
        return self._recent[known]

    def _keep(self, known: Provenance, real: Any) -> None:
        nbytes = _bytes(real) if isinstance(real, torch.Tensor) else 0
        if nbytes <= _SMALL_BYTES:
            self._small[known] = real
        elif nbytes <= _RECENT_BYTES:
            self._recent[known] = real
            while sum(map(_bytes, self._recent.values())) > _RECENT_BYTES:
                self._recent.popitem(last=False)

    def _computed(self, known: Provenance) -> Any:
        """Compute a value from those that are kept. Intermediate values are freed after their last use."""
        order, found = self._missing(known), dict[Provenance, Any]()
        reads = Counter(parent for one in order for parent in one.parents())

        def value_of(leaf: Any) -> Any:
            if not isinstance(leaf, Provenance):
                # Values that a model on the meta device computes from constants alone are known too: on the CPU.
                return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type == "meta" else hint(leaf)
            return found[leaf] if leaf in found else self._at_hand(leaf)

        for one in order:
            found[one] = one.computed(value_of, (*SYMBOLIC, torch.device))
            reads.subtract(one.parents())
            for parent in {*one.parents()}:
                if not reads[parent]:
                    found.pop(parent, None)
        return found[known]

    def _missing(self, known: Provenance) -> list[Provenance]:
        """The values that must be computed for this one, in order."""
        order: dict[Provenance, None] = {}
        waiting = [known]
        while waiting:
            one = waiting[-1]
            first = [parent for parent in one.parents() if parent not in order and not self._is_at_hand(parent)]
            waiting += first
            if not first:
                order[waiting.pop()] = None
        return [*order]


def elements(tensor: torch.Tensor) -> int:
    return int(math.prod(map(hint, tensor.shape)))


def _bytes(tensor: torch.Tensor) -> int:
    return elements(tensor) * tensor.itemsize


def known_value(traced: torch.Tensor, constant: bool = False) -> torch.Tensor | None:
    """The real value of a traced tensor that derives only from constants and integer inputs (``constant``: only from
    constants); else ``None``."""
    fake = fake_of(traced)
    known = getattr(fake, "_lowtide_known", None)
    return None if known is None or (constant and not known.is_constant()) else fake.fake_mode.values.of(known)


def read_values(traced: torch.Tensor) -> torch.Tensor | None:
    """The real tensor for Python code that reads all values of a traced one, which is a question. ``None`` if they are
    unknown."""
    if not isinstance(traced, (FakeTensor, FunctionalTensor)):
        return traced
    fake = fake_of(traced)
    real, known = known_value(fake), getattr(fake, "_lowtide_known", None)
    if real is not None and known is not None and known.depends_on_input:
        with no_dispatch():
            fake.fake_mode._remember(known, "values", real.tolist())
    return real
