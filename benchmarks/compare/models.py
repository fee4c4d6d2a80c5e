"""The models that are compared, with the blocks that a user would checkpoint by hand.

Sizes are such that the operators that matter take about a millisecond or more on one core. Dropout is off, so that
compiled and eager steps can be compared. ``batch`` scales a sample; by default it is that of the model's docstring.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.zoo import MeanSquare, Sample, classes, image, seeded, tokens

_VOCABULARY = 512


@dataclass(frozen=True, slots=True)
class Compared:
    """``make(batch)`` builds a sample; ``blocks(model)`` are the modules that a user would checkpoint one by one."""

    make: Callable[[int], Sample]
    batch: int
    blocks: Callable[[nn.Module], list[nn.Module]]

    def sample(self, batch: int = 0) -> Sample:
        """Built under the zoo's seed, in training mode."""
        return seeded(lambda: self.make(batch or self.batch))()


def of_class(*names: str) -> Callable[[nn.Module], list[nn.Module]]:
    """The modules whose class has one of these names."""
    return lambda model: [module for module in model.modules() if type(module).__name__ in names]


def _gpt2(batch: int) -> Sample:
    """8 layers, width 256, 256 tokens, batch 4."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=_VOCABULARY, n_positions=256, n_embd=256, n_layer=8, n_head=8, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    ids = tokens(batch, 256, _VOCABULARY)
    return GPT2LMHeadModel(config), (), {"input_ids": ids, "labels": ids}


def _t5(batch: int) -> Sample:
    """4 + 4 layers, width 256, 192 tokens on both sides, batch 4."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=_VOCABULARY, d_model=256, d_kv=32, d_ff=1024, num_layers=4, num_heads=8, dropout_rate=0.0,
        decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config)
    return model, (), {"input_ids": tokens(batch, 192, _VOCABULARY), "labels": tokens(batch, 192, _VOCABULARY)}


def _resnet50(batch: int) -> Sample:
    """ResNet-50 of He et al. for 1,000 classes, 112 x 112 pixels, batch 8."""
    from transformers import ResNetConfig, ResNetForImageClassification

    model = ResNetForImageClassification(ResNetConfig(num_labels=1000))
    return model, (), {"pixel_values": image(batch, 112), "labels": classes(batch, 1000)}


def _denoised(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result.sample


def _unet(batch: int) -> Sample:
    """A denoising U-Net of four levels (32, 64, 96, 128), two layers each, attention at two, 64 x 64 pixels, batch 4."""
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=64,
        block_out_channels=(32, 64, 96, 128),
        layers_per_block=2,
        down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
        norm_num_groups=16,
    )
    return MeanSquare(model, _denoised), (image(batch, 64), classes(batch, 1000)), {"target": image(batch, 64)}


def _vit(batch: int) -> Sample:
    """8 layers, width 256, patches of 8 x 8 in 112 x 112 pixels, batch 4."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=256, num_hidden_layers=8, num_attention_heads=8, intermediate_size=1024, image_size=112,
        patch_size=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=1000,
    )  # fmt: skip
    return ViTForImageClassification(config), (), {"pixel_values": image(batch, 112), "labels": classes(batch, 1000)}


def _llama(batch: int) -> Sample:
    """8 layers, width 256, 256 tokens, batch 4."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=_VOCABULARY, hidden_size=256, intermediate_size=704, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=256, use_cache=False,
    )  # fmt: skip
    ids = tokens(batch, 256, _VOCABULARY)
    return LlamaForCausalLM(config), (), {"input_ids": ids, "labels": ids}


COMPARED: dict[str, Compared] = {
    "gpt2": Compared(_gpt2, 4, of_class("GPT2Block")),
    "t5": Compared(_t5, 4, of_class("T5Block")),
    "resnet50": Compared(_resnet50, 8, of_class("ResNetBottleNeckLayer")),
    "unet": Compared(_unet, 4, of_class("ResnetBlock2D", "Attention")),
    "vit": Compared(_vit, 4, of_class("ViTLayer")),
    "llama": Compared(_llama, 4, of_class("LlamaDecoderLayer")),
}
