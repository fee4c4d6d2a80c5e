"""The fake tensors that a trace starts from: those of a model's state, and of a call's arguments."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor

from lowtide.capture.trace.expected import note_flag
from lowtide.capture.trace.fake import AnsweringFakeMode


def fakes_of(
    mode: AnsweringFakeMode,
    state: Sequence[torch.Tensor],
    tensors: Sequence[torch.Tensor],
    unknown: Collection[int] = (),
) -> list[torch.Tensor]:
    """Fake tensors of the state, then of the arguments. ``unknown``: positions of those that answer no questions."""
    every = enumerate((*state, *tensors))
    return [_fake(mode, tensor, i, len(state), i not in unknown) for i, tensor in every]


def _fake(mode: AnsweringFakeMode, tensor: torch.Tensor, position: int, states: int, answers: bool) -> torch.Tensor:
    if isinstance(tensor, FakeTensor):  # a sample without memory
        return _same_layout(mode, tensor)
    leaf, state = tensor.detach() if tensor.grad_fn is not None else tensor, position < states
    fake: torch.Tensor = (
        mode.from_tensor(leaf, static_shapes=True)
        if mode.sizes is None or state
        else mode.sizes.fake(mode, leaf, position - states)
    )
    if tensor.grad_fn is not None and tensor.requires_grad:
        fake.requires_grad_()
    if answers:
        mode.register_input(fake, tensor, position, state)
    if state and _is_flag(tensor):
        note_flag(fake, float(tensor))
    copy_attributes(tensor, fake)
    return fake


def _is_flag(tensor: torch.Tensor) -> bool:
    """Whether it is a buffer of one floating-point number."""
    floating = tensor.is_floating_point() and not tensor.requires_grad
    return floating and tensor.numel() == 1 and tensor.device.type != "meta"


def _same_layout(mode: AnsweringFakeMode, tensor: torch.Tensor) -> torch.Tensor:
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    fake._lowtide_empty = False  # type: ignore[attr-defined]
    return fake.requires_grad_(tensor.requires_grad)


def copy_attributes(real: torch.Tensor, traced: torch.Tensor) -> None:
    """Give a traced tensor the attributes that Python code set on the real one."""
    if not isinstance(real, FakeTensor):
        vars(traced).update({name: value for name, value in vars(real).items() if name not in vars(traced)})
