"""Small models for the tests, deep and wide enough that a plan has something to decide."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

WIDTH = 32
BATCH = 256


class Residual(nn.Module):
    """``x + body(x)``."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)


class WithLoss(nn.Module):
    """A body whose mean square is the result, so that the whole step lies inside the plan."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = self.body(*args, **kwargs)
        return (result.abs() if result.is_complex() else result.float()).square().mean()


class LookedAt(nn.Module):
    """Blocks, after each of which it looks at values, so that it is no single program; the mean square is the result."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            if x.abs().sum() > 1e30:
                raise OverflowError
        return x.square().mean()


def perceptron(depth: int = 6, width: int = WIDTH, activation: Callable[[], nn.Module] = nn.GELU) -> nn.Sequential:
    """Linear layers and activations in turn."""
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(width, width), activation())))


def residual_blocks(make_body: Callable[[], nn.Module], depth: int = 4) -> nn.Sequential:
    return nn.Sequential(*(Residual(make_body()) for _ in range(depth)))


def rows(batch: int = BATCH, width: int = WIDTH, *, requires_grad: bool = False) -> Callable[[int], Any]:
    """``make_inputs`` for models of one floating tensor; other values at every iteration."""

    def make_inputs(iteration: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        values = torch.randn(batch, width, generator=generator(iteration))
        return (values.requires_grad_(requires_grad),), {}

    return make_inputs


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + seed)


def tiny_gpt2(words: int) -> nn.Module:
    """Two layers for up to 32 of so many words, in training mode."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=words,
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=2,
        use_cache=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model.train()


class Generated(nn.Module):
    """Has a function that text defines, in a dictionary of names."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.names = perceptron(2), {"scale": 1.0}
        exec("def scaled(x): return x * scale", self.names)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.names["scaled"](self.body(x)).square().mean()  # type: ignore[operator]
