"""Images and videos: convolutions, attention over patches, memory banks, self-supervision."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.outside_models.language import tokens
from benchmarks.outside_models.register import outside
from benchmarks.zoo import Sample, image


@outside("vit-pytorch")
def cait() -> Sample:
    """Layers dropped by random numbers."""
    from vit_pytorch.cait import CaiT

    sizes = {"image_size": 64, "patch_size": 8, "num_classes": 10, "dim": 128, "depth": 6, "cls_depth": 2, "heads": 4}
    model = CaiT(**sizes, mlp_dim=256, dropout=0.1, emb_dropout=0.1, layer_dropout=0.1)
    return model, (image(8, 64),), {}


@outside("vit-pytorch")
def navit() -> Sample:
    """Images of several sizes, packed in Python."""
    from vit_pytorch.na_vit import NaViT

    sizes = {"image_size": 64, "patch_size": 8, "num_classes": 10, "dim": 96, "depth": 4, "heads": 4, "mlp_dim": 192}
    images = [image(1, size)[0] for size in (64, 48, 32, 64)]
    return NaViT(**sizes, dropout=0.1, token_dropout_prob=0.1), ([images[:2], images[2:]],), {}


@outside("vit-pytorch")
def dino() -> Sample:
    """A teacher that is made at the first call, a running centre, two augmented views."""
    from vit_pytorch import Dino, ViT

    net = ViT(image_size=32, patch_size=8, num_classes=10, dim=64, depth=2, heads=2, mlp_dim=128)
    sizes = {"image_size": 32, "hidden_layer": "to_latent", "projection_hidden_size": 64, "num_classes_K": 256}
    plain = nn.Identity()
    return Dino(net, **sizes, projection_layers=3, augment_fn=plain, augment_fn2=plain), (image(8, 32),), {}


@outside("vit-pytorch")
def vit_patch_dropout() -> Sample:
    from vit_pytorch.vit_with_patch_dropout import ViT

    sizes = {"image_size": 64, "patch_size": 8, "num_classes": 10, "dim": 96, "depth": 4, "heads": 4, "mlp_dim": 192}
    return ViT(**sizes, patch_dropout=0.25, dropout=0.1), (image(8, 64),), {}


@outside("vit-pytorch")
def maxvit() -> Sample:
    from vit_pytorch.max_vit import MaxViT

    return MaxViT(num_classes=10, dim=32, depth=(1, 1), dim_head=16, window_size=4), (image(4, 64),), {}


@outside("timm")
def timm_efficientnet() -> Sample:
    """Dropped paths."""
    import timm

    return timm.create_model("tf_efficientnet_b0", drop_path_rate=0.2, num_classes=10), (image(4, 64),), {}


@outside("timm")
def timm_swin() -> Sample:
    import timm

    return (
        timm.create_model("swin_tiny_patch4_window7_224", img_size=56, window_size=7, num_classes=10),
        (image(2, 56),),
        {},
    )


@outside("timm")
def timm_beit() -> Sample:
    import timm

    sizes = {"img_size": 64, "patch_size": 16, "embed_dim": 96, "depth": 4, "num_heads": 4, "num_classes": 10}
    return timm.models.beit.Beit(**sizes, drop_path_rate=0.1, init_values=0.1), (image(8, 64),), {}


@outside("timm")
def timm_features() -> Sample:
    """Features of every stage, by a wrapper that is a ModuleDict."""
    import timm

    return timm.create_model("resnet10t", features_only=True), (image(4, 64),), {}


@outside("torchvision")
def retina_net() -> Sample:
    """Boxes are matched to anchors, in lists of images and of dictionaries."""
    from torchvision.models.detection import retinanet_resnet50_fpn

    model = retinanet_resnet50_fpn(weights=None, weights_backbone=None, num_classes=5, min_size=96, max_size=96)
    boxes = torch.tensor([[8.0, 8.0, 40.0, 50.0], [30.0, 20.0, 90.0, 80.0]])
    targets = [{"boxes": boxes, "labels": torch.tensor([1, 2])}, {"boxes": boxes[:1], "labels": torch.tensor([3])}]
    return model, ([image(1, 96)[0], image(1, 96)[0]], targets), {}


@outside("torchvision")
def deeplab() -> Sample:
    """Returns an ordered dictionary."""
    from torchvision.models.segmentation import deeplabv3_mobilenet_v3_large

    model = deeplabv3_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=5, aux_loss=True)
    return model, (image(2, 64),), {}


@outside("torchvision")
def googlenet() -> Sample:
    """Returns a named tuple."""
    from torchvision.models import googlenet as make

    return make(weights=None, num_classes=10, init_weights=False), (image(4, 96),), {}


@outside("torchvision")
def raft() -> Sample:
    """Refined again and again through one recurrent block, with sampling from grids."""
    from torchvision.models.optical_flow import raft_small

    return raft_small(weights=None), (image(1, 128), image(1, 128)), {"num_flow_updates": 4}


@outside("segmentation-models-pytorch")
def segmentation_unet() -> Sample:
    import segmentation_models_pytorch as smp

    return smp.Unet("resnet18", encoder_weights=None, classes=3), (image(2, 64),), {}


@outside("segmentation-models-pytorch")
def segmentation_manet() -> Sample:
    import segmentation_models_pytorch as smp

    return smp.MAnet("mobilenet_v2", encoder_weights=None, classes=3, aux_params={"classes": 4}), (image(2, 64),), {}


@outside("efficientnet-pytorch")
def efficientnet() -> Sample:
    """Custom autograd functions, connections dropped at random."""
    from efficientnet_pytorch import EfficientNet

    return EfficientNet.from_name("efficientnet-b0", num_classes=10), (image(4, 64),), {}


@outside("pretrainedmodels")
def xception() -> Sample:
    import pretrainedmodels

    return pretrainedmodels.xception(num_classes=10, pretrained=None), (image(2, 96),), {}


@outside("lambda-networks")
def lambda_layers() -> Sample:
    from lambda_networks import LambdaLayer

    layers = [LambdaLayer(dim=32, dim_out=32, n=8, dim_k=16, heads=4, dim_u=1) for _ in range(2)]
    return nn.Sequential(*layers), (image(4, 8, 32),), {}


@outside("halonet-pytorch")
def halonet() -> Sample:
    from halonet_pytorch import HaloAttention

    layers = [HaloAttention(dim=64, block_size=4, halo_size=2, dim_head=16, heads=4) for _ in range(3)]
    return nn.Sequential(*layers), (image(2, 16, 64),), {}


@outside("glom-pytorch")
def glom() -> Sample:
    """Levels that are updated again and again."""
    from glom_pytorch import Glom

    return Glom(dim=64, levels=4, image_size=32, patch_size=8), (image(4, 32),), {"iters": 6}


@outside("slot-attention")
def slot_attention() -> Sample:
    """Random slots, recurrent."""
    from slot_attention import SlotAttention

    return SlotAttention(num_slots=5, dim=64, iters=3), (torch.randn(4, 128, 64),), {}


@outside("bottleneck-transformer-pytorch")
def bottleneck_transformer() -> Sample:
    from bottleneck_transformer_pytorch import BottleStack

    sizes = {"dim": 32, "fmap_size": 16, "dim_out": 64, "num_layers": 2, "heads": 4, "dim_head": 16}
    return BottleStack(**sizes, downsample=True, rel_pos_emb=True), (image(2, 16, 32),), {}


@outside("axial-attention")
def axial_attention() -> Sample:
    """A reversible stack."""
    from axial_attention import AxialImageTransformer

    model = AxialImageTransformer(dim=32, depth=4, heads=4, reversible=True, axial_pos_emb_shape=(16, 16))
    return model, (image(2, 16, 32),), {}


@outside("timesformer-pytorch")
def timesformer() -> Sample:
    from timesformer_pytorch import TimeSformer

    sizes = {"dim": 64, "image_size": 32, "patch_size": 8, "num_frames": 4, "num_classes": 10, "depth": 3, "heads": 4}
    return TimeSformer(**sizes, dim_head=16, attn_dropout=0.1), (torch.randn(2, 4, 3, 32, 32),), {}


@outside("open_clip_torch")
def open_clip() -> Sample:
    """A dictionary of features and a scale."""
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    seen = CLIPVisionCfg(layers=3, width=64, head_width=16, patch_size=8, image_size=64, patch_dropout=0.3)
    read = CLIPTextCfg(context_length=32, vocab_size=200, width=64, heads=4, layers=3)
    return CLIP(32, seen, read, output_dict=True), (image(8, 64), torch.randint(0, 200, (8, 32))), {}


@outside("x-clip")
def x_clip() -> Sample:
    from x_clip import CLIP

    text = {"dim_text": 64, "dim_latent": 64, "num_text_tokens": 200, "text_enc_depth": 2, "text_seq_len": 32}
    seen = {"dim_image": 64, "visual_enc_depth": 2, "visual_image_size": 32, "visual_patch_size": 8, "text_heads": 4}
    switches = {"use_all_token_embeds": True, "decoupled_contrastive_learning": True, "use_mlm": True}
    model = CLIP(**text, **seen, visual_heads=4, visual_patch_dropout=0.5, **switches)
    return model, (torch.randint(0, 200, (4, 32)), image(4, 32)), {"return_loss": True, "freeze_image_encoder": False}


@outside("perceiver-pytorch")
def perceiver() -> Sample:
    """Layers that share their weights, found by a cache of keys."""
    from perceiver_pytorch import Perceiver

    heads = {"cross_heads": 1, "latent_heads": 4, "cross_dim_head": 16, "latent_dim_head": 16}
    sizes = {"num_freq_bands": 4, "max_freq": 10.0, "depth": 3, "num_latents": 32, "latent_dim": 64, "num_classes": 10}
    dropout = {"attn_dropout": 0.1, "ff_dropout": 0.1}
    model = Perceiver(input_channels=3, input_axis=2, weight_tie_layers=True, **sizes, **heads, **dropout)
    return model, (torch.randn(4, 32, 32, 3),), {}


@outside("coca-pytorch")
def captions() -> Sample:
    """A hook that each call takes off and puts on again, patches dropped at random."""
    from coca_pytorch.coca_pytorch import CoCa
    from vit_pytorch.extractor import Extractor
    from vit_pytorch.simple_vit_with_patch_dropout import SimpleViT

    sizes = {"image_size": 32, "patch_size": 8, "num_classes": 10, "dim": 64, "depth": 2, "heads": 4, "mlp_dim": 128}
    encoder = Extractor(SimpleViT(**sizes, patch_dropout=0.5), return_embeddings_only=True, detach=False)
    depths = {"unimodal_depth": 2, "multimodal_depth": 2, "dim_head": 16, "heads": 4}
    model = CoCa(dim=64, img_encoder=encoder, image_dim=64, num_tokens=200, **depths)
    return model, (tokens(2, 32), image(2, 32)), {"return_loss": True}


@outside("lightly")
def masked_autoencoder() -> Sample:
    """Tokens that random numbers choose, put in their places again."""
    from lightly.models import utils
    from lightly.models.modules import MAEDecoderTIMM, MaskedVisionTransformerTIMM
    from timm.models.vision_transformer import VisionTransformer

    class Autoencoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            vit = VisionTransformer(img_size=64, patch_size=8, embed_dim=64, depth=4, num_heads=4)
            self.encoder = MaskedVisionTransformerTIMM(vit=vit)
            sizes = {
                "embed_dim": 64,
                "decoder_embed_dim": 48,
                "decoder_depth": 2,
                "decoder_num_heads": 4,
                "mlp_ratio": 2.0,
            }
            drops = {"proj_drop_rate": 0.1, "attn_drop_rate": 0.0}
            self.decoder = MAEDecoderTIMM(num_patches=64, patch_size=8, **sizes, **drops)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            size = images.shape[0], self.encoder.sequence_length
            keep, hidden = utils.random_token_mask(size=size, mask_ratio=0.75, device=images.device)
            seen = self.decoder.embed(self.encoder.encode(images=images, idx_keep=keep))
            filled = utils.set_at_index(utils.repeat_token(self.decoder.mask_token, size), keep, seen)
            found = self.decoder.predict(utils.get_at_index(self.decoder.decode(filled), hidden))
            return nn.functional.mse_loss(found, utils.get_at_index(utils.patchify(images, 8), hidden - 1))

    return Autoencoder(), (image(16, 64),), {}


@outside("segment-anything")
def promptable_masks() -> Sample:
    """Windows with relative positions; points of each image by the labels that they have."""
    from segment_anything.modeling import ImageEncoderViT, MaskDecoder, PromptEncoder, TwoWayTransformer

    class Segmenter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            windows = {"use_rel_pos": True, "global_attn_indexes": [1], "window_size": 4, "out_chans": 32}
            self.encoder = ImageEncoderViT(64, 8, embed_dim=64, depth=4, num_heads=4, **windows)
            self.prompts = PromptEncoder(32, (8, 8), (64, 64), mask_in_chans=16)
            decoder = TwoWayTransformer(depth=2, embedding_dim=32, num_heads=4, mlp_dim=64)
            self.decoder = MaskDecoder(transformer_dim=32, transformer=decoder)

        def forward(self, images: torch.Tensor, points: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
            found, place = [], self.prompts.get_dense_pe()
            for features, where, kind in zip(self.encoder(images), points, labels, strict=True):
                sparse, dense = self.prompts((where[None], kind[None]), None, None)
                found += self.decoder(features[None], place, sparse, dense, multimask_output=True)
            return found

    return Segmenter(), (image(4, 64), torch.rand(4, 2, 2) * 64, torch.tensor([[1, 0], [1, 1], [0, 1], [1, 0]])), {}
