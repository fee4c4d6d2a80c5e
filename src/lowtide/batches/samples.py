"""Samples of any batch size, without their memory.

The user's function runs on fake tensors, and floating-point results stay fake. Integers get values, since a program may
ask about them ("is this mask all ones?"): those of a small real sample, repeated. If the function cannot run on fake
tensors, or a small sample's integers do not fit, it runs on real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lowtide.errors import PlanError
from lowtide.objects import structure
from lowtide.program import generators

Sample: TypeAlias = tuple[Sequence[Any], Mapping[str, Any]]
MakeSample: TypeAlias = Callable[[int], Sample]


class Samples:
    """``fake(batch)``: a sample for capture. ``real(batch)``: the result of the user's function."""

    def __init__(self, make_sample: MakeSample, small: int) -> None:
        self.make_sample = make_sample
        self.small, _ = structure.flatten_distinct(self.real(small))

    def real(self, batch: int) -> Sample:
        """A real sample. Raises ``PlanError`` if the function raises, or does not return ``(args, kwargs)``."""
        with generators.all_kept():
            return _called(self.make_sample, batch)

    def fake(self, batch: int) -> Sample:
        """A sample with the structure and layouts of ``real(batch)`` and fake floating-point tensors."""
        fakes: list[torch.Tensor] = []
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):
                fakes, tree = structure.flatten_distinct(_called(self.make_sample, batch))
        except (PlanError, RuntimeError, TypeError, ValueError) as error:
            if isinstance(error, PlanError) and error.__cause__ is None:
                raise  # it ran, but did not return a sample
        tensors = [self._with_values(fake, index) for index, fake in enumerate(fakes)]
        if not fakes or any(tensor is None for tensor in tensors):
            found, tree = structure.flatten_distinct(self.real(batch))
            with FakeTensorMode() as mode:
                tensors = [mode.from_tensor(tensor) if _carries_no_answers(tensor) else tensor for tensor in found]
        sample: Sample = structure.unflatten(tree, tensors)
        return sample

    def _with_values(self, tensor: torch.Tensor, index: int) -> torch.Tensor | None:
        if not isinstance(tensor, FakeTensor) or _carries_no_answers(tensor):
            return tensor
        return _repeated(self.small[index], tensor) if index < len(self.small) else None


def _called(make_sample: MakeSample, batch: int) -> Sample:
    try:
        sample = make_sample(batch)
    except Exception as error:
        raise PlanError(f"make_sample({batch}) raised {type(error).__name__}: {error}.") from error
    if not isinstance(sample, tuple) or len(sample) != 2 or not isinstance(sample[1], Mapping):
        raise PlanError(
            f"make_sample({batch}) returned a {type(sample).__name__}, not the pair (args, kwargs) of a call of the model; "
            'for instance make_sample = lambda batch: ((), {"input_ids": torch.zeros(batch, 128, dtype=torch.long)}).'
        )
    args, kwargs = sample
    if not isinstance(args, (tuple, list)):
        raise PlanError(f"make_sample({batch}) returned args of type {type(args).__name__}; they are a tuple.")
    return tuple(args), dict(kwargs)


def _carries_no_answers(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _repeated(small: torch.Tensor, like: torch.Tensor) -> torch.Tensor | None:
    """``small`` repeated along every dimension in which ``like`` is larger; ``None`` if the two do not match."""
    if small.dim() != like.dim() or small.dtype != like.dtype or small.device != like.device or 0 in small.shape:
        return None
    counts = [-(-size // have) for size, have in zip(like.shape, small.shape, strict=True)]
    whole = small.repeat(counts) if counts else small
    part = whole[tuple(slice(size) for size in like.shape)]
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device).copy_(part)
