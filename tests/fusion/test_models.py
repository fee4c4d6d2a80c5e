"""Whole architectures with compiled kernels: gradients close to eager's, peaks as predicted and within the budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.networks import tiny_gpt2
from tests.support.training import compare_training

pytestmark = pytest.mark.slow
TOLERANCE = 5e-4
_WORDS = 100


def _tokens(iteration: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    ids = torch.randint(3, _WORDS, (2, 24), generator=torch.Generator().manual_seed(iteration))
    return (), {"input_ids": ids, "labels": ids}


def _images(iteration: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    generator = torch.Generator().manual_seed(iteration)
    return (), {
        "pixel_values": torch.randn(4, 3, 32, 32, generator=generator),
        "labels": torch.randint(0, 4, (4,), generator=generator),
    }


def _noisy(iteration: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    generator = torch.Generator().manual_seed(iteration)
    return (torch.randn(2, 3, 16, 16, generator=generator), torch.tensor([1, 7])), {}


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=_WORDS,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return T5ForConditionalGeneration(config)


def _resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[2, 1], num_labels=4)
    return ResNetForImageClassification(config)


class _UNet(nn.Module):
    """Without the biases of attention keys, which a softmax does not see: their gradients are nothing but rounding."""

    def __init__(self) -> None:
        from diffusers import UNet2DModel

        super().__init__()
        self.inner = UNet2DModel(
            sample_size=16,
            block_out_channels=(32,),
            norm_num_groups=4,
            layers_per_block=1,
            down_block_types=("DownBlock2D",),
            up_block_types=("UpBlock2D",),
        )
        for name, parameter in self.inner.named_parameters():
            parameter.requires_grad_(not name.endswith("to_k.bias"))

    def forward(self, image: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(image, time, return_dict=False)[0]
        return result.square().mean()


@pytest.mark.parametrize(
    ("model", "inputs"),
    [(lambda: tiny_gpt2(_WORDS), _tokens), (_t5, _tokens), (_resnet, _images)],
    ids=["gpt2", "t5", "resnet"],
)
def test_architectures(model: Any, inputs: Any) -> None:
    compare_training(model, inputs, budgets=("100%", "60%"), iterations=2, tolerance=TOLERANCE, compiler="inductor")


def test_unet() -> None:
    compare_training(
        _UNet, _noisy, budgets=("100%", "60%"), iterations=2, tolerance=TOLERANCE, planner="greedy", compiler="inductor"
    )
