"""Volumes, augmentation in the model, self-supervision, losses by networks, invertible blocks."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.outside_models.register import outside
from benchmarks.zoo import Sample, classes, image


@outside("monai")
def monai_vnet() -> Sample:
    from monai.networks.nets import VNet

    return VNet(spatial_dims=3, in_channels=1, out_channels=2), (torch.randn(1, 1, 32, 32, 32),), {}


@outside("monai")
def monai_segresnet() -> Sample:
    """A variational decoder that draws from a distribution."""
    from monai.networks.nets import SegResNetVAE

    model = SegResNetVAE(input_image_size=(16, 16, 16), init_filters=8, in_channels=1, out_channels=2)
    return model, (torch.randn(1, 1, 16, 16, 16),), {}


@outside("monai")
def monai_swin_unetr() -> Sample:
    from monai.networks.nets import SwinUNETR

    return SwinUNETR(in_channels=1, out_channels=2, feature_size=12, spatial_dims=2), (torch.randn(1, 1, 64, 64),), {}


@outside("monai")
def monai_dynunet() -> Sample:
    """Deep supervision through lists in attributes."""
    from monai.networks.nets import DynUNet

    sizes = {"kernel_size": [3, 3, 3, 3], "strides": [1, 2, 2, 2], "upsample_kernel_size": [2, 2, 2]}
    model = DynUNet(2, 1, 3, **sizes, filters=[8, 16, 32, 64], deep_supervision=True, deep_supr_num=2)
    return model, (image(2, 64, 1),), {}


@outside("monai")
def monai_diffusion() -> Sample:
    from monai.networks.nets import DiffusionModelUNet

    sizes = {"channels": (16, 32), "attention_levels": (False, True), "num_res_blocks": 1, "norm_num_groups": 8}
    model = DiffusionModelUNet(2, 1, 1, **sizes, num_head_channels=8)
    return model, (image(2, 32, 1), torch.tensor([3, 70])), {}


@outside("kornia")
def kornia_pipeline() -> Sample:
    """Augments, filters and warps, all differentiable, before a network."""
    import kornia
    from kornia.augmentation import AugmentationSequential, ColorJiggle, RandomAffine, RandomHorizontalFlip

    augmented = AugmentationSequential(RandomHorizontalFlip(), RandomAffine(20.0), ColorJiggle(0.1, 0.1, 0.1, 0.1))

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.augmented = nn.Conv2d(3, 3, 3, padding=1), augmented
            self.last = nn.Conv2d(3, 8, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.augmented(self.first(x).sigmoid())
            result: torch.Tensor = self.last(kornia.filters.gaussian_blur2d(x, (5, 5), (1.5, 1.5)))
            return result

    return Network(), (torch.rand(4, 3, 64, 64),), {}


@outside("kornia")
def kornia_hardnet() -> Sample:
    from kornia.feature import HardNet

    return HardNet(False), (image(64, 32, 1),), {}


@outside("byol-pytorch")
def byol() -> Sample:
    """A moving average of the network, hooks that catch a hidden layer, projectors made at the first call."""
    from byol_pytorch import BYOL
    from torchvision.models import resnet18

    return BYOL(resnet18(weights=None), image_size=32, hidden_layer="avgpool"), (image(4, 32),), {}


@outside("lpips")
def perceptual_loss() -> Sample:
    import lpips

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Conv2d(3, 3, 3, padding=1)
            self.loss = lpips.LPIPS(pretrained=False, net="squeeze", pnet_rand=True, verbose=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = self.loss(self.net(x), x).mean()
            return loss

    return Network(), (image(4, 64),), {}


@outside("pytorch-metric-learning")
def metric_learning() -> Sample:
    """Mines triplets by their distances."""
    from pytorch_metric_learning import losses, miners

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 32))
            self.miner, self.loss = miners.MultiSimilarityMiner(), losses.TripletMarginLoss()

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            found = self.net(x)
            loss: torch.Tensor = self.loss(found, labels, self.miner(found, labels))
            return loss

    return Network(), (torch.randn(64, 64), classes(64, 8)), {}


@outside("memcnn")
def reversible_blocks() -> Sample:
    """Invertible: empties storages in the forward pass and fills them in the backward pass."""
    import memcnn

    def block() -> nn.Module:
        def one() -> nn.Module:
            return nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())

        return memcnn.InvertibleModuleWrapper(memcnn.AdditiveCoupling(one(), one()), keep_input=False)

    return nn.Sequential(nn.Conv2d(3, 16, 1), *(block() for _ in range(4))), (image(4, 32),), {}


@outside("g-mlp-pytorch")
def gmlp_vision() -> Sample:
    from g_mlp_pytorch import gMLPVision

    model = gMLPVision(image_size=64, patch_size=8, num_classes=10, dim=128, depth=6, prob_survival=0.9)
    return model, (torch.randn(8, 3, 64, 64),), {}


@outside("lightly")
def contrast_with_a_queue() -> Sample:
    """MoCo: an average of the encoder, moved in the forward pass, and a bank of what it has seen."""
    from lightly.loss import NTXentLoss
    from lightly.models.modules import MoCoProjectionHead
    from lightly.models.utils import deactivate_requires_grad, update_momentum
    from torchvision.models import resnet18

    class Contrast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.average = (
                nn.Sequential(resnet18(num_classes=64), MoCoProjectionHead(64, 64, 32)) for _ in range(2)
            )
            deactivate_requires_grad(self.average)
            self.loss = NTXentLoss(memory_bank_size=(64, 32))

        def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            update_momentum(self.encoder, self.average, m=0.9)
            loss: torch.Tensor = self.loss(self.encoder(one), self.average(other).detach())
            return loss

    return Contrast(), (image(8, 64), image(8, 64)), {}
