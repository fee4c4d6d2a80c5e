"""What a fused kernel computes: the operators that it replaces, on tensors of fixed layouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from lowtide.cost.signature import target_name
from lowtide.program.program import Call, TensorMeta
from lowtide.program.references import map_references

Code = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]  # empties the list of inputs


@dataclass(frozen=True, slots=True)
class Line:
    """One operator of a kernel. ``Ref`` numbers are local; ``outputs`` are the numbers that it defines."""

    call: Call
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Body:
    """What a kernel computes. Values are numbered: inputs from 0, then each line's outputs. ``results`` are returned.

    ``donated``: nothing reads the first input afterwards, and the only result may take its memory.
    """

    inputs: tuple[TensorMeta, ...]
    lines: tuple[Line, ...]
    results: tuple[int, ...]
    metas: tuple[TensorMeta, ...]  # layouts of the results
    donated: bool = False

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run operator by operator, as plain PyTorch does."""
        known = dict(enumerate(tensors))
        for line in self.lines:
            args, kwargs = map_references((line.call.args, line.call.kwargs), lambda ref: known[ref.value])
            result = line.call.target(*args, **kwargs)
            pieces = [result] if line.call.positions is None else [result[i] for i in line.call.positions]
            known.update(zip(line.outputs, pieces, strict=True))
        return tuple(known[number] for number in self.results)

    @property
    def strides(self) -> list[tuple[int, ...]]:
        """The strides of the results."""
        return [meta.stride for meta in self.metas]

    @property
    def operators(self) -> tuple[str, ...]:
        """The names of the operators, each once."""
        return tuple(dict.fromkeys(target_name(line.call.target) for line in self.lines))

    def __str__(self) -> str:
        heads = map(_layout, range(len(self.inputs)), self.inputs)
        lines = (f"{line.outputs} = {_text(line.call)}" for line in self.lines)
        results = map(_layout, self.results, self.metas)
        return "\n".join([*heads, *lines, "return over %0" if self.donated else "return", *results])


def _layout(number: int, meta: TensorMeta) -> str:
    return f"%{number}: {meta.dtype}{meta.shape}{meta.stride}+{meta.storage_offset % 16}@{meta.device}"


def _text(call: Call) -> str:
    return f"{target_name(call.target)}{call.args!r}{sorted(call.kwargs.items())!r}->{call.positions}"
