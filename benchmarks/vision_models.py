"""Vision models of the zoo: convolutional and attention classifiers, segmentation, image and text, diffusion."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.zoo import MeanSquare, Sample, classes, image, tokens, zoo

__all__ = [
    "beit",
    "clip",
    "convnext",
    "dinov2",
    "dit",
    "mobilenet_v2",
    "regnet",
    "resnet",
    "segformer",
    "swin",
    "unet2d",
    "unet2d_condition",
    "vae",
    "vit",
]

_LABELS = 10


def _classifier(model: Any, batch: int, size: int) -> Sample:
    return model, (), {"pixel_values": image(batch, size), "labels": classes(batch, _LABELS)}


def _sample(result: Any) -> torch.Tensor:
    return result.sample


@zoo
def vit() -> Sample:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=64,
        patch_size=8,
        num_labels=_LABELS,
    )
    return _classifier(ViTForImageClassification(config), 16, 64)


@zoo
def beit() -> Sample:
    from transformers import BeitConfig, BeitForImageClassification

    config = BeitConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=64,
        patch_size=8,
        use_relative_position_bias=True,
        num_labels=_LABELS,
    )
    return _classifier(BeitForImageClassification(config), 16, 64)


@zoo
def dinov2() -> Sample:
    from transformers import Dinov2Config, Dinov2ForImageClassification

    config = Dinov2Config(
        hidden_size=128,
        mlp_ratio=2,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=64,
        patch_size=8,
        num_labels=_LABELS,
    )
    return _classifier(Dinov2ForImageClassification(config), 16, 64)


@zoo
def swin() -> Sample:
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(
        image_size=64,
        patch_size=4,
        embed_dim=48,
        depths=[2, 2, 2],
        num_heads=[2, 4, 8],
        window_size=4,
        num_labels=_LABELS,
    )
    return _classifier(SwinForImageClassification(config), 16, 64)


@zoo
def convnext() -> Sample:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(
        hidden_sizes=[32, 64, 128, 160], depths=[2, 2, 3, 2], drop_path_rate=0.1, num_labels=_LABELS
    )
    return _classifier(ConvNextForImageClassification(config), 16, 64)


@zoo
def resnet() -> Sample:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=32, hidden_sizes=[64, 128, 192, 256], depths=[2, 2, 2, 2], num_labels=_LABELS)
    return _classifier(ResNetForImageClassification(config), 16, 96)


@zoo
def regnet() -> Sample:
    from transformers import RegNetConfig, RegNetForImageClassification

    config = RegNetConfig(
        embedding_size=32, hidden_sizes=[32, 64, 96, 128], depths=[1, 2, 3, 1], groups_width=16, num_labels=_LABELS
    )
    return _classifier(RegNetForImageClassification(config), 16, 96)


@zoo
def mobilenet_v2() -> Sample:
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    config = MobileNetV2Config(depth_multiplier=0.35, image_size=96, num_labels=_LABELS)
    return _classifier(MobileNetV2ForImageClassification(config), 8, 96)


@zoo
def segformer() -> Sample:
    """Bilinear upsampling of every stage and of the logits."""
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    config = SegformerConfig(
        hidden_sizes=[16, 32, 64, 96],
        depths=[1, 1, 2, 1],
        num_attention_heads=[1, 2, 4, 4],
        decoder_hidden_size=64,
        num_labels=_LABELS,
    )
    labels = torch.randint(0, _LABELS, (4, 128, 128))
    return SegformerForSemanticSegmentation(config), (), {"pixel_values": image(4, 128), "labels": labels}


@zoo
def clip() -> Sample:
    from transformers import CLIPConfig, CLIPModel

    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
    text = {**shape, "vocab_size": 512, "max_position_embeddings": 32, "eos_token_id": 511, "bos_token_id": 1}
    config = CLIPConfig(text_config=text, vision_config={**shape, "image_size": 64, "patch_size": 8}, projection_dim=64)
    ids = tokens(16, 32, 511)
    ids[:, -1] = 511
    return CLIPModel(config), (), {"input_ids": ids, "pixel_values": image(16, 64), "return_loss": True}


@zoo
def unet2d() -> Sample:
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=32,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(32, 64, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=16,
    )
    steps = torch.randint(0, 1000, (4,))
    return MeanSquare(model, _sample), (image(4, 32), steps), {"target": image(4, 32)}


@zoo
def unet2d_condition() -> Sample:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
        norm_num_groups=16,
    )
    args = (image(4, 16, 4), torch.randint(0, 1000, (4,)), torch.randn(4, 16, 32))
    return MeanSquare(model, _sample), args, {"target": image(4, 16, 4)}


@zoo
def vae() -> Sample:
    from diffusers import AutoencoderKL

    model = AutoencoderKL(
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=16,
        sample_size=32,
    )
    pictures = image(4, 32)
    return MeanSquare(model, _sample), (pictures,), {"target": pictures, "sample_posterior": True}


@zoo
def dit() -> Sample:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=32,
        in_channels=4,
        out_channels=4,
        num_layers=3,
        sample_size=16,
        patch_size=2,
        norm_num_groups=4,
        num_embeds_ada_norm=1000,
    )
    kwargs = {"timestep": torch.randint(0, 1000, (16,)), "class_labels": classes(16, 1000)}
    return MeanSquare(model, _sample), (image(16, 16, 4),), {**kwargs, "target": image(16, 16, 4)}
