"""Properties of operators that the online mode needs before it runs them, read once from their schemas."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from lowtide.program.generators import form_with_generator
from lowtide.program.repeating import differs_in_bits, repeats_all_bits
from lowtide.program.running_statistics import WRITTEN, written_positions

Position = int | str  # of an argument: its place, or its name where it is passed by name

# Storage is shared though the schema does not say so, or contents are new but nothing is computed.
_PASSES = {"_unsafe_view", "_reshape_alias", "lift_fresh", "lift", "_nested_view_from_buffer"}
# Of their tensor argument these read the geometry alone, so it may be evicted.
_GEOMETRY_ONLY = {
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like",
    "new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full",
}  # fmt: skip
# Dropout between layers draws from a state that the library has on the device, which no generator tells of: the position of the
# probability, before that of the flag for training.
_MASKS = {"_cudnn_rnn": 11, "miopen_rnn": 9}
# Collectives write into some of the tensors that they are given and read others, perhaps after they have returned; the schemas
# do not say which.
_WRITE_UNSAID = {"c10d", "_c10d_functional", "_c10d_functional_autograd"}
# Operators that are functions of their arguments and of the generator's state.
_FUNCTIONS = {"aten", "prims", "torchvision"}
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_DEVICES = (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)


class Operator:
    """One overload.

    ``passes``: a view, which moves no bytes; ``detaches``: the one by which a leaf gets its gradient. ``composite``: to be
    taken apart first. ``writes``: the positions of tensors that it changes. ``random``: reads a generator. ``once``: never
    run again (collectives, effects, operators from elsewhere, of which nothing is known). ``geometry_only``: reads no
    contents. ``statistics``: the name of a norm that writes some in training, which are left out when it runs again.
    ``masks``: the position of a probability by which a recurrent layer drops what no generator says. ``differs``: there are
    devices on which it does not repeat its bits. ``run``: calls ``overload``.
    """

    __slots__ = (
        "_drawing",
        "composite",
        "detaches",
        "differs",
        "geometry_only",
        "masks",
        "name",
        "once",
        "overload",
        "passes",
        "random",
        "run",
        "statistics",
        "writes",
    )  # fmt: skip

    def __init__(self, overload: Any) -> None:
        self.overload = overload
        # Without the function in Python that only hands the arguments on.
        self.run = overload._op if type(overload) is OpOverload else overload
        self._drawing: Operator | None = None
        self.detaches = overload is torch.ops.aten.detach.default
        self.name = str(overload)
        self.passes = self.composite = self.random = self.geometry_only = False
        self.once = True
        self.differs = differs_in_bits(overload)
        self.writes: tuple[Position, ...] = ()
        self.statistics, self.masks = "", -1
        if isinstance(overload, OpOverload):
            self._read_schema(overload)

    def _read_schema(self, overload: OpOverload) -> None:
        schema = overload._schema
        name = schema.name.split("::")[1]
        self.writes = tuple(
            argument.name if argument.kwarg_only else place
            for place, argument in enumerate(schema.arguments)
            if (argument.alias_info is not None and argument.alias_info.is_write)
            or (overload.namespace in _WRITE_UNSAID and "Tensor" in str(argument.type))
        )
        full_name: str = overload.name()  # type: ignore[no-untyped-call]
        has_kernel = functools.partial(torch._C._dispatch_has_kernel_for_dispatch_key, full_name)
        # A few (silu_backward) are made of other operators and have kernels of their own, which eager takes.
        self.composite = has_kernel(_COMPOSITE) and not any(map(has_kernel, _DEVICES))
        aliases = bool(schema.returns) and all(returned.alias_info is not None for returned in schema.returns)
        self.passes = not self.composite and not self.writes and (aliases or name in _PASSES)
        self.random = torch.Tag.nondeterministic_seeded in overload.tags
        self.geometry_only = name in _GEOMETRY_ONLY
        self.once = overload.namespace not in _FUNCTIONS
        self.statistics, self.masks = name if name in WRITTEN else "", _MASKS.get(name, -1)

    def can_repeat(self, args: Sequence[Any], device: torch.device) -> bool:
        """Whether a call with these arguments can be repeated and gives the same bits."""
        if self.masks >= 0 and args[self.masks] and args[self.masks + 1]:
            return False
        return not (self.once or self.writes or (self.differs and not repeats_all_bits(device)))

    def unread(self, args: Sequence[Any]) -> tuple[int, ...]:
        """Return positions that are written and not read: running statistics in training (in evaluation they are only read)."""
        return written_positions(self.statistics, args)

    def with_generator(self, given: int) -> Operator | None:
        """Return the overload with a keyword ``generator`` beside ``given`` positional arguments, or ``None``."""
        form = form_with_generator(self.overload, given)
        if form is None:
            return None
        if form is self.overload:
            return self
        self._drawing = self._drawing or Operator(form)
        return self._drawing


def values_at(positions: tuple[Position, ...], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments at these positions; ``None`` for omitted ones."""
    return [kwargs.get(at) if isinstance(at, str) else args[at] if at < len(args) else None for at in positions]
