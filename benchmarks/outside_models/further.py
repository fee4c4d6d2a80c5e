"""Further models: attention of other kinds, potentials and equivariant networks, tables, recommendations, diffusion."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.outside_models.language import tokens
from benchmarks.outside_models.register import outside
from benchmarks.zoo import Sample, image


@outside("perceiver-pytorch")
def perceiver() -> Sample:
    """Layers that share their weights, found by a cache of keys."""
    from perceiver_pytorch import Perceiver

    heads = {"cross_heads": 1, "latent_heads": 4, "cross_dim_head": 16, "latent_dim_head": 16}
    sizes = {"num_freq_bands": 4, "max_freq": 10.0, "depth": 3, "num_latents": 32, "latent_dim": 64, "num_classes": 10}
    dropout = {"attn_dropout": 0.1, "ff_dropout": 0.1}
    model = Perceiver(input_channels=3, input_axis=2, weight_tie_layers=True, **sizes, **heads, **dropout)
    return model, (torch.randn(4, 32, 32, 3),), {}


@outside("mega-pytorch")
def mega() -> Sample:
    """Moving averages by Fourier transforms."""
    from mega_pytorch import Mega

    sizes = {"num_tokens": 200, "dim": 64, "depth": 3, "ema_heads": 8, "attn_dim_qk": 16, "attn_dim_value": 64}
    return Mega(**sizes, laplacian_attn_fn=True), (tokens(2, 128),), {}


@outside("hourglass-transformer-pytorch")
def hourglass() -> Sample:
    """Sequences that are shortened and lengthened again."""
    from hourglass_transformer_pytorch import HourglassTransformerLM

    sizes = {"num_tokens": 200, "dim": 64, "max_seq_len": 128, "heads": 4, "dim_head": 16, "depth": (2, 2, 2)}
    kind = {"shorten_factor": 2, "attn_resampling": True, "updown_sample_type": "linear", "causal": True}
    return HourglassTransformerLM(**sizes, **kind), (tokens(2, 128),), {}


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


@outside("infini-transformer-pytorch")
def infini_transformer() -> Sample:
    """Segments that hand memories on, detached every other time; positions that are cached."""
    from infini_transformer_pytorch import InfiniTransformer, InfiniTransformerWrapper

    sizes = {"num_tokens": 200, "dim": 64, "depth": 2, "dim_head": 16, "heads": 4}
    model = InfiniTransformer(**sizes, use_mem_delta_rule=True)
    wrapper = InfiniTransformerWrapper(model, segment_length=32, detach_mems_every_num_segments=2)
    return wrapper, (tokens(2, 128),), {}


@outside("En-transformer")
def equivariant_transformer() -> Sample:
    """Neighbours by distances."""
    from en_transformer import EnTransformer

    model = EnTransformer(dim=64, depth=3, dim_head=32, heads=4, neighbors=8)
    return model, (torch.randn(2, 32, 64), torch.randn(2, 32, 3)), {"mask": torch.ones(2, 32).bool()}


@outside("equiformer-pytorch")
def equiformer() -> Sample:
    """Representations of the rotations, by tables that are read from files."""
    from equiformer_pytorch import Equiformer

    sizes = {
        "num_tokens": 24,
        "dim": (4, 4, 2),
        "dim_head": (4, 4, 4),
        "heads": (2, 2, 2),
        "num_degrees": 3,
        "depth": 2,
    }
    model = Equiformer(**sizes, attend_self=True, reduce_dim_out=True, num_neighbors=4)
    return model, (tokens(1, 16, 24), torch.randn(1, 16, 3), torch.ones(1, 16).bool()), {}


@outside("torchcde")
def neural_cde() -> Sample:
    """A differential equation that a spline drives."""
    import torchcde

    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(16, 64), nn.Linear(64, 16 * 4)

        def forward(self, _: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
            return self.last(self.first(z).relu()).tanh().view(*z.shape[:-1], 16, 4)

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.field, self.first, self.last = Field(), nn.Linear(4, 16), nn.Linear(16, 1)

        def forward(self, coefficients: torch.Tensor) -> Any:
            path = torchcde.CubicSpline(coefficients)
            given = {"z0": self.first(path.evaluate(path.interval[0])), "t": path.interval, "adjoint": False}
            z = torchcde.cdeint(X=path, func=self.field, method="rk4", options={"step_size": 0.5}, **given)
            return self.last(z[:, -1])

    walks = torch.randn(32, 20, 4).cumsum(1)
    return Network(), (torchcde.hermite_cubic_coefficients_with_backward_differences(walks),), {}


@outside("FrEIA")
def invertible_blocks() -> Sample:
    from FrEIA.framework import SequenceINN
    from FrEIA.modules import AllInOneBlock

    def network(wide: int, out: int) -> nn.Module:
        return nn.Sequential(nn.Linear(wide, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, out))

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.flow = SequenceINN(16)
            for _ in range(6):
                self.flow.append(AllInOneBlock, subnet_constructor=network, permute_soft=True)

        def forward(self, x: torch.Tensor) -> Any:
            z, determinant = self.flow(x)
            return (0.5 * z.square().sum(1) - determinant).mean()

    return Flow(), (torch.randn(128, 16),), {}


@outside("deepctr-torch")
def interest_network() -> Sample:
    """Recommendations by a history of items, as many as there are."""
    from deepctr_torch.inputs import DenseFeat, SparseFeat, VarLenSparseFeat
    from deepctr_torch.models import DIN

    history = SparseFeat("hist_item", 30, embedding_dim=8, embedding_name="item")
    columns = [SparseFeat("user", 10, embedding_dim=8), SparseFeat("item", 30, embedding_dim=8), DenseFeat("score", 1)]
    columns += [VarLenSparseFeat(history, 10, length_name="seq_length")]
    model = DIN(columns, ["item"], dnn_dropout=0.1, att_weight_normalization=True, device="cpu")
    ranges = ((0, 10, 1), (1, 30, 1), (0, 2, 1), (1, 30, 10), (1, 10, 1))
    return model, (torch.cat([torch.randint(low, high, (64, wide)) for low, high, wide in ranges], 1).float(),), {}


@outside("rtdl_revisiting_models")
def table_transformer() -> Sample:
    from rtdl_revisiting_models import FTTransformer

    sizes = {"n_cont_features": 12, "cat_cardinalities": [4, 7], "d_out": 1, "n_blocks": 3, "d_block": 64}
    dropout = {"attention_dropout": 0.2, "ffn_dropout": 0.1, "residual_dropout": 0.1}
    hidden = {"attention_n_heads": 4, "ffn_d_hidden": None, "ffn_d_hidden_multiplier": 4 / 3}
    categories = torch.stack([torch.randint(0, 4, (64,)), torch.randint(0, 7, (64,))], 1)
    return FTTransformer(**sizes, **hidden, **dropout), (torch.randn(64, 12), categories), {}


@outside("diffusers")
def conditional_unet() -> Sample:
    from diffusers import UNet2DConditionModel

    blocks = {
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    }
    sizes = {"sample_size": 16, "block_out_channels": (32, 64), "layers_per_block": 1, "cross_attention_dim": 32}
    model = UNet2DConditionModel(**sizes, **blocks, attention_head_dim=8, norm_num_groups=8, dropout=0.1)
    given = {"encoder_hidden_states": torch.randn(2, 8, 32), "return_dict": False}
    return model, (torch.randn(2, 4, 16, 16), torch.tensor([3, 7])), given


@outside("mace-torch")
def molecular_potential() -> Sample:
    """Forces: gradients of an energy, in a function of another file, which are differentiated again."""
    from e3nn import o3
    from mace.modules import MACE, interaction_classes

    kinds = {
        "interaction_cls": interaction_classes["RealAgnosticResidualInteractionBlock"],
        "interaction_cls_first": interaction_classes["RealAgnosticInteractionBlock"],
    }
    shapes = {"hidden_irreps": o3.Irreps("8x0e+8x1o"), "MLP_irreps": o3.Irreps("8x0e"), "max_ell": 2, "correlation": 2}
    radial = {"r_max": 5.0, "num_bessel": 4, "num_polynomial_cutoff": 5, "avg_num_neighbors": 8.0}
    atoms = {"num_elements": 2, "atomic_energies": np.zeros(2), "atomic_numbers": [1, 8]}
    mace = MACE(**kinds, **shapes, **radial, **atoms, num_interactions=2, gate=nn.functional.silu)

    class Potential(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mace = mace

        def forward(self, molecule: dict[str, torch.Tensor]) -> Any:
            found = self.mace(dict(molecule), training=True)
            return found["energy"].square().mean() + found["forces"].square().mean()

    edges = torch.stack(torch.where(~torch.eye(16, dtype=torch.bool)))
    shifts = torch.zeros(edges.shape[1], 3)
    molecule = {
        "positions": torch.randn(16, 3) * 2,
        "node_attrs": nn.functional.one_hot(torch.randint(0, 2, (16,)), 2).float(),
        "edge_index": edges,
        "shifts": shifts,
        "unit_shifts": shifts,
        "cell": torch.zeros(3, 3),
        "batch": torch.zeros(16, dtype=torch.long),
        "ptr": torch.tensor([0, 16]),
    }
    return Potential(), (molecule,), {}
