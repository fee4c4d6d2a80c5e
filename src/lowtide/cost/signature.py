"""A key for operator calls that cost the same: the target, the layouts of its tensors, and its other arguments.

Grammar of the key, a string that is the same in all processes::

    key       ::= target "(" argument* ")" "->" positions tensor* "|" settings
    argument  ::= tensor | number | text | "[" argument* "]"
    number    ::= as Python writes it; "float" if it is neither whole nor a half: kernels have no special case for it
    tensor    ::= "%" n dtype shape stride offset device     n counts distinct tensors; storage offset modulo 64 bytes
                  ["of" bytes "at" offset]                   if the whole storage is copied
    settings  ::= threads, determinism, matmul precision     and other settings that choose kernels
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from lowtide.program.layouts import copies_storage
from lowtide.program.precision import matmul_precision, tf32
from lowtide.program.program import Program, Ref, TensorMeta

ALIGNMENT_BYTES = 64
_OBJECT = "<object "  # an object of this process
_GENERATOR_STATES = ("philox_seed", "philox_offset", "rng_state")  # names of results in schemas


def signature(program: Program, op: int) -> str:
    call = program.calls[op]
    arguments = _Describer(program, copies_storage(call.target)).text((call.args, dict(sorted(call.kwargs.items()))))
    results = ",".join(_layout(program.metas[value]) for value in program.graph.ops[op].outputs)
    return f"{target_name(call.target)}{arguments}->{call.positions}[{results}]|{settings()}"


def is_lasting(key: str) -> bool:
    """Whether a key means the same in other processes, so that it may be written to a file."""
    return _OBJECT not in key


def target_name(target: Callable[..., Any]) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', repr(target))}"


def origin_of(program: Program, value: int) -> int | None:
    """The operator that alone can make a value, else ``None``: for bytes that it keeps for its backward pass, and for
    the generator state from which it drew random numbers (on the host, though other results may not be)."""
    producer = program.graph.values[value].producer
    if producer is None:
        return None
    call = program.calls[producer]
    place = program.graph.ops[producer].outputs.index(value)
    position = 0 if call.positions is None else call.positions[place]
    returns = call.target._schema.returns if isinstance(call.target, torch._ops.OpOverload) else []
    named = returns[position].name if position < len(returns) else ""
    return producer if program.metas[value].dtype == torch.uint8 or named in _GENERATOR_STATES else None


def settings() -> str:
    """The process-wide settings that choose kernels."""
    backends = torch.backends
    switches = (
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        matmul_precision(),
        tf32(backends.cudnn),
        backends.mkldnn.enabled,
        backends.cudnn.enabled,
        backends.cudnn.benchmark,
        backends.cudnn.deterministic,
    )
    return ",".join(map(str, switches))


@dataclass(frozen=True, slots=True)
class _Describer:
    program: Program
    whole: bool
    numbers: dict[int, int] = field(default_factory=dict)

    def text(self, argument: Any) -> str:
        if isinstance(argument, Ref):
            number = self.numbers.setdefault(argument.value, len(self.numbers))
            meta = self.program.metas[argument.value]
            storage = f"of{meta.storage_bytes}at{meta.storage_offset}" if self.whole else ""
            return f"%{number}{_layout(meta)}{storage}{self._origin(argument.value)}"
        if isinstance(argument, Mapping):
            return "{" + ",".join(f"{key}={self.text(item)}" for key, item in argument.items()) + "}"
        if isinstance(argument, (list, tuple)):
            return "[" + ",".join(self.text(item) for item in argument) + "]"
        if isinstance(argument, float) and math.isfinite(argument) and not (2 * argument).is_integer():
            return "float"
        if argument is None or isinstance(argument, (bool, int, float, complex, str)):
            return repr(argument)
        if isinstance(argument, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
            return str(argument)
        return f"{_OBJECT}{type(argument).__name__} {id(argument)}>"

    def _origin(self, value: int) -> str:
        """The operator that alone can make this value, since its content depends on it."""
        producer = origin_of(self.program, value)
        return "" if producer is None else f"<-{target_name(self.program.calls[producer].target)}"


def _layout(meta: TensorMeta) -> str:
    offset = meta.storage_offset * meta.dtype.itemsize % ALIGNMENT_BYTES
    dtype = str(meta.dtype).removeprefix("torch.")
    entries = "" if meta.entries is None else f"of{meta.entries}"
    return f"{dtype}{list(meta.shape)}{list(meta.stride)}{entries}+{offset}@{meta.device}".replace(" ", "")
