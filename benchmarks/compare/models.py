"""The models that are compared, with the blocks that a user would checkpoint by hand.

``SMALL`` ones are for a CPU: operators that matter take about a millisecond or more on one core. ``LARGE`` ones are for a
GPU, at sizes that people train there, in bfloat16 where that is usual. Dropout is off, so that compiled and eager steps can
be compared. ``batch`` scales a sample; by default it is the table's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.zoo import MeanSquare, Sample, classes, image, in_precision, seeded, tokens

_VOCABULARY = 512  # of small models

Make = Callable[[int], Sample]
Blocks = Callable[[nn.Module], list[nn.Module]]


@dataclass(frozen=True, slots=True)
class Compared:
    """``make(batch)`` builds a sample; ``blocks(model)`` are the modules that a user would checkpoint one by one."""

    make: Make
    batch: int
    blocks: Blocks
    dtype: torch.dtype = torch.float32

    def sample(self, batch: int = 0) -> Sample:
        """Built under the zoo's seed, in training mode."""
        sample = seeded(lambda: self.make(batch or self.batch))()
        return sample if self.dtype == torch.float32 else in_precision(sample, self.dtype)

    @property
    def finer(self) -> torch.dtype:
        """The precision beside which rounding shows."""
        return torch.float64 if self.dtype == torch.float32 else torch.float32


def of_class(*names: str) -> Blocks:
    """The modules whose class has one of these names."""
    return lambda model: [module for module in model.modules() if type(module).__name__ in names]


def _gpt2(layers: int, width: int, heads: int, length: int, vocabulary: int = _VOCABULARY) -> Make:
    def make(batch: int) -> Sample:
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=vocabulary, n_positions=length, n_embd=width, n_layer=layers, n_head=heads, use_cache=False,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        ids = tokens(batch, length, vocabulary)
        return GPT2LMHeadModel(config), (), {"input_ids": ids, "labels": ids}

    return make


def _llama(
    layers: int, width: int, inner: int, heads: int, length: int, vocabulary: int = _VOCABULARY, tied: bool = False
) -> Make:
    """With half as many heads for keys, or, from 32 on, a quarter."""

    def make(batch: int) -> Sample:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=vocabulary, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=heads // (4 if heads >= 32 else 2),
            max_position_embeddings=length, tie_word_embeddings=tied, use_cache=False,
        )  # fmt: skip
        ids = tokens(batch, length, vocabulary)
        return LlamaForCausalLM(config), (), {"input_ids": ids, "labels": ids}

    return make


def _t5(batch: int) -> Sample:
    """4 + 4 layers, width 256, 192 tokens on both sides."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=_VOCABULARY, d_model=256, d_kv=32, d_ff=1024, num_layers=4, num_heads=8, dropout_rate=0.0,
        decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config)
    return model, (), {"input_ids": tokens(batch, 192, _VOCABULARY), "labels": tokens(batch, 192, _VOCABULARY)}


def _resnet(depths: Sequence[int], pixels: int) -> Make:
    """Of He et al., with bottlenecks, for 1,000 classes."""

    def make(batch: int) -> Sample:
        from transformers import ResNetConfig, ResNetForImageClassification

        model = ResNetForImageClassification(ResNetConfig(depths=list(depths), num_labels=1000))
        return model, (), {"pixel_values": image(batch, pixels), "labels": classes(batch, 1000)}

    return make


def _denoised(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result.sample


def _unet(batch: int) -> Sample:
    """A denoising U-Net of four levels (32, 64, 96, 128), two layers each, attention at two, 64 x 64 pixels."""
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


def _conditional_unet(batch: int) -> Sample:
    """The U-Net of Stable Diffusion 1: latents of 64 x 64, conditioned on 77 tokens of width 768."""
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(sample_size=64, cross_attention_dim=768)
    latents, text = image(batch, 64, channels=4), torch.randn(batch, 77, 768)
    positional = (latents, classes(batch, 1000))
    return (
        MeanSquare(model, _denoised),
        positional,
        {"encoder_hidden_states": text, "target": torch.randn_like(latents)},
    )


def _vit(batch: int) -> Sample:
    """8 layers, width 256, patches of 8 x 8 in 112 x 112 pixels."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=256, num_hidden_layers=8, num_attention_heads=8, intermediate_size=1024, image_size=112,
        patch_size=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=1000,
    )  # fmt: skip
    return ViTForImageClassification(config), (), {"pixel_values": image(batch, 112), "labels": classes(batch, 1000)}


_GPT2_BLOCKS, _LLAMA_BLOCKS, _RESNET_BLOCKS = map(of_class, ("GPT2Block", "LlamaDecoderLayer", "ResNetBottleNeckLayer"))
SMALL: dict[str, Compared] = {
    "gpt2": Compared(_gpt2(8, 256, 8, 256), 4, _GPT2_BLOCKS),
    "t5": Compared(_t5, 4, of_class("T5Block")),
    "resnet50": Compared(_resnet((3, 4, 6, 3), 112), 8, _RESNET_BLOCKS),
    "unet": Compared(_unet, 4, of_class("ResnetBlock2D", "Attention")),
    "vit": Compared(_vit, 4, of_class("ViTLayer")),
    "llama": Compared(_llama(8, 256, 704, 8, 256), 4, _LLAMA_BLOCKS),
}
LARGE: dict[str, Compared] = {
    "gpt2-medium": Compared(_gpt2(24, 1024, 16, 1024, 50257), 8, _GPT2_BLOCKS, torch.bfloat16),
    "gpt2-xl": Compared(_gpt2(48, 1600, 25, 1024, 50257), 4, _GPT2_BLOCKS, torch.bfloat16),
    "llama-1b": Compared(_llama(16, 2048, 8192, 32, 2048, 128256, tied=True), 4, _LLAMA_BLOCKS, torch.bfloat16),
    "resnet101": Compared(_resnet((3, 4, 23, 3), 224), 64, _RESNET_BLOCKS),
    "unet-sd": Compared(_conditional_unet, 8, of_class("ResnetBlock2D", "Transformer2DModel"), torch.bfloat16),
}
COMPARED: dict[str, Compared] = {**SMALL, **LARGE}
