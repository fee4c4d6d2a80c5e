"""The register behind ``benchmarks.models``: a decorator, a sample type and the one way to get a loss out of a result.

A zoo entry is a callable that returns ``(model, args, kwargs)``, so that the command line can plan it directly:
``lowtide plan benchmarks.models:gpt2 --budget 40%``. Every entry is deterministic (weights and inputs come from a seed of
their own, whatever the caller's generator is) and leaves the caller's generator untouched. Models are returned in
training mode, in float32, with the dropout of their published configuration.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

Sample = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
Factory = Callable[[], Sample]

_FACTORIES: dict[str, Factory] = {}
SEED = 0


def zoo(make: Factory) -> Factory:
    """Register ``make`` under its name, see ``seeded``."""
    factory = functools.wraps(make)(seeded(make))
    _FACTORIES[make.__name__] = factory
    return factory


def seeded(make: Factory) -> Factory:
    """``make`` with its result built under the zoo's seed and put into training mode."""

    def factory() -> Sample:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            model, args, kwargs = make()
        return model.train(), args, kwargs

    return factory


def factories() -> dict[str, Factory]:
    """All registered factories by name, in the order of registration."""
    return dict(_FACTORIES)


def loss_of(result: Any) -> torch.Tensor:
    """The scalar to differentiate: the result itself where it is a scalar, else its ``loss``."""
    loss = result if isinstance(result, torch.Tensor) else result.loss
    if loss.numel() != 1:
        raise ValueError(f"the model returned a tensor of shape {tuple(loss.shape)} instead of a scalar loss")
    return loss


def in_precision(sample: Sample, dtype: torch.dtype) -> Sample:
    """The sample with all that is floating-point in ``dtype``; its model is converted in place."""
    model, args, kwargs = sample

    def converted(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    args, kwargs = pytree.tree_map(converted, (args, kwargs))
    return model.to(dtype), args, kwargs


def moved(sample: Sample, device: torch.device) -> Sample:
    """The sample on a device; its model is moved in place."""
    model, args, kwargs = sample
    args, kwargs = pytree.tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, (args, kwargs))
    return model.to(device), args, kwargs


class MeanSquare(nn.Module):
    """Gives a model that has no loss of its own one: the mean square of one tensor of its result, against ``target``."""

    def __init__(self, model: nn.Module, select: Callable[[Any], torch.Tensor]) -> None:
        super().__init__()
        self.model = model
        self.select = select

    def forward(self, *args: Any, target: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return nn.functional.mse_loss(self.select(self.model(*args, **kwargs)), target)


def tokens(batch: int, length: int, vocabulary: int) -> torch.Tensor:
    """Random token ids; 0 to 3 are left out, since models give them special meanings."""
    return torch.randint(4, vocabulary, (batch, length))


def image(batch: int, size: int, channels: int = 3) -> torch.Tensor:
    return torch.randn(batch, channels, size, size)


def classes(batch: int, count: int) -> torch.Tensor:
    return torch.randint(0, count, (batch,))
