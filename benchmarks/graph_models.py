"""The models behind ``benchmarks/graphs``: published shapes, at batches under which activations dominate the peak.

Each entry returns ``(model, args, kwargs)`` as the zoo's do. Vocabularies are small, so that one tensor of logits does not
decide which budgets can be met; everything else is the published configuration named in the docstring. GPT-2 is
narrower than published: its depth is what is varied here.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from benchmarks.zoo import Factory, MeanSquare, Sample, classes, image, seeded, tokens

_VOCABULARY = 512


def _gpt2(layers: int) -> Sample:
    """GPT-2 of width 256 and 8 heads, batch 8, sequence 256, dropout 0.1."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=_VOCABULARY,
        n_positions=256,
        n_embd=256,
        n_layer=layers,
        n_head=8,
        use_cache=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    ids = tokens(8, 256, _VOCABULARY)
    return GPT2LMHeadModel(config), (), {"input_ids": ids, "labels": ids}


def _resnet50() -> Sample:
    """ResNet-50 of He et al. for 1,000 classes, batch 48, 128 x 128 pixels."""
    from transformers import ResNetConfig, ResNetForImageClassification

    model = ResNetForImageClassification(ResNetConfig(num_labels=1000))
    return model, (), {"pixel_values": image(48, 128), "labels": classes(48, 1000)}


def _denoised(result: Any) -> torch.Tensor:
    return result.sample


def _unet() -> Sample:
    """The U-Net of ``google/ddpm-cifar10-32`` (35.7 million parameters, attention at 16 x 16), batch 32."""
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=32,
        block_out_channels=(128, 256, 256, 256),
        layers_per_block=2,
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=None,
        downsample_padding=0,
        flip_sin_to_cos=False,
        freq_shift=1,
        norm_eps=1e-6,
    )
    kwargs: dict[str, Any] = {"target": image(32, 32)}
    return MeanSquare(model, _denoised), (image(32, 32), classes(32, 1000)), kwargs


def _t5() -> Sample:
    """T5 small (6 + 6 layers, width 512, feed-forward 2,048, dropout 0.1), batch 16, sequences of 256 and 128."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=_VOCABULARY, decoder_start_token_id=0, use_cache=False)
    model = T5ForConditionalGeneration(config)
    return model, (), {"input_ids": tokens(16, 256, _VOCABULARY), "labels": tokens(16, 128, _VOCABULARY)}


def _swin() -> Sample:
    """Swin-T (depths 2, 2, 6, 2, width 96, windows of 7 x 7), batch 16, 224 x 224 pixels."""
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(num_labels=1000)
    return SwinForImageClassification(config), (), {"pixel_values": image(16, 224), "labels": classes(16, 1000)}


GRAPH_MODELS: dict[str, Factory] = {
    **{f"gpt2_{layers}": seeded(functools.partial(_gpt2, layers)) for layers in (2, 12, 24, 48)},
    "resnet50": seeded(_resnet50),
    "unet": seeded(_unet),
    "t5": seeded(_t5),
    "swin": seeded(_swin),
}
