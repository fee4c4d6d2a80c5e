"""Models of other packages that are no single program, made small: they decide by data or by random numbers, call objects that
nothing can follow, count, or initialise themselves from their first batch.

Packages are imported where a model is built, and are no dependencies of the project: ``outside_requirements.txt`` pins them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.zoo import Factory, Sample, seeded

OUTSIDE: dict[str, Factory] = {}


def outside(make: Factory) -> Factory:
    """Register ``make`` under its name."""
    OUTSIDE[make.__name__] = factory = seeded(make)
    return factory


@outside
def cait() -> Sample:
    """vit-pytorch: layers dropped by random numbers."""
    from vit_pytorch.cait import CaiT

    sizes = {"image_size": 64, "patch_size": 8, "num_classes": 10, "dim": 128, "depth": 6, "cls_depth": 2, "heads": 4}
    model = CaiT(**sizes, mlp_dim=256, dropout=0.1, emb_dropout=0.1, layer_dropout=0.1)
    return model, (torch.randn(8, 3, 64, 64),), {}


@outside
def gmlp() -> Sample:
    """g-mlp-pytorch: layers dropped by random numbers."""
    from g_mlp_pytorch import gMLP

    model = gMLP(num_tokens=200, dim=128, depth=6, seq_len=64, prob_survival=0.9)
    return model, (torch.randint(0, 200, (8, 64)),), {}


@outside
def gmlp_vision() -> Sample:
    from g_mlp_pytorch import gMLPVision

    model = gMLPVision(image_size=64, patch_size=8, num_classes=10, dim=128, depth=6, prob_survival=0.9)
    return model, (torch.randn(8, 3, 64, 64),), {}


@outside
def st_moe() -> Sample:
    """st-moe-pytorch: routes by values, with a capacity per expert."""
    from st_moe_pytorch import MoE, SparseMoEBlock

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            moe = MoE(dim=64, num_experts=4, gating_top_n=2)
            self.block = SparseMoEBlock(moe, add_ff_before=True, add_ff_after=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = self.block(x)
            loss: torch.Tensor = found.outputs.square().mean() + found.total_aux_loss
            return loss

    return Routed(), (torch.randn(4, 128, 64),), {}


@outside
def mixture_of_experts() -> Sample:
    """Routes by values; most of the memory is in the routing."""
    from mixture_of_experts import MoE

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(MoE(dim=64, num_experts=8, hidden_dim=256) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            loss = torch.zeros(())
            for layer in self.layers:
                y, own = layer(x)
                x, loss = x + y, loss + own
            return loss + x.square().mean()

    return Routed(), (torch.randn(4, 128, 64),), {}


@outside
def graph_convolution() -> Sample:
    """PyTorch Geometric: is called with an object."""
    from torch_geometric.data import Data
    from torch_geometric.nn import GCNConv

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList((GCNConv(32, 64), GCNConv(64, 64), GCNConv(64, 8)))

        def forward(self, data: Any) -> torch.Tensor:
            x = data.x
            for layer in self.layers:
                x = nn.functional.dropout(layer(x, data.edge_index).relu(), 0.5, self.training)
            return x.square().mean()

    data = Data(x=torch.randn(2000, 32), edge_index=torch.randint(0, 2000, (2, 10000)))
    return Network(), (data,), {}


@outside
def e3nn_products() -> Sample:
    """e3nn: tuples without a length, and graphs of torch.fx."""
    from e3nn import o3

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            irreps = o3.Irreps("16x0e+8x1o")
            self.products = nn.ModuleList(o3.FullyConnectedTensorProduct(irreps, irreps, irreps) for _ in range(3))
            self.linears = nn.ModuleList(o3.Linear(irreps, irreps) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for product, linear in zip(self.products, self.linears, strict=True):
                x = x + linear(product(x, x))
            return x.square().mean()

    return Network(), (torch.randn(256, 40),), {}


@outside
def dopri5() -> Sample:
    """torchdiffeq: steps as long as errors allow."""
    from torchdiffeq import odeint

    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 64))

        def forward(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.net(y)
            return result

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.field, self.first = Field(), nn.Linear(32, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            times = torch.tensor([0.0, 1.0])
            return odeint(self.field, self.first(x), times, rtol=1e-3, atol=1e-3)[-1].square().mean()

    return Network(), (torch.randn(256, 32),), {}


@outside
def nflows_glow() -> Sample:
    """nflows: initialised from the first batch."""
    from nflows.nn.nets import ResidualNet
    from nflows.transforms import ActNorm, AffineCouplingTransform, CompositeTransform
    from nflows.transforms.lu import LULinear

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            steps: list[nn.Module] = []
            for index in range(4):
                mask = torch.ones(16)
                mask[index % 2 :: 2] = -1
                coupling = AffineCouplingTransform(mask, lambda a, b: ResidualNet(a, b, hidden_features=64))
                steps += [ActNorm(16), LULinear(16), coupling]
            self.transform = CompositeTransform(steps)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            z, determinant = self.transform(x)
            loss: torch.Tensor = (z.square().sum(1) / 2 - determinant).mean()
            return loss

    return Flow(), (torch.randn(512, 16),), {}


@outside
def normflows_glow() -> Sample:
    """normflows: initialised from the first batch."""
    import normflows

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            steps: list[nn.Module] = []
            for _ in range(4):
                net = normflows.nets.MLP([8, 64, 64, 16], init_zeros=True)
                steps += [normflows.flows.AffineCouplingBlock(net), normflows.flows.Permute(16, mode="swap")]
                steps.append(normflows.flows.ActNorm((16,)))
            self.steps = nn.ModuleList(steps)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            determinant = torch.zeros(())
            for step in self.steps:
                x, own = step(x)
                determinant = determinant + own
            return (x.square().sum(1) / 2 - determinant).mean()

    return Flow(), (torch.randn(512, 16),), {}


@outside
def svgp() -> Sample:
    """GPyTorch: compares tensors, and returns objects that refer to modules."""
    import gpytorch

    class Process(gpytorch.models.ApproximateGP):
        def __init__(self, inducing: torch.Tensor) -> None:
            distribution = gpytorch.variational.CholeskyVariationalDistribution(inducing.size(0))
            super().__init__(gpytorch.variational.VariationalStrategy(self, inducing, distribution))
            self.mean = gpytorch.means.ConstantMean()
            self.covariance = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x: torch.Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.covariance(x))

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 4))
            self.process = Process(torch.randn(32, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = self.process(self.features(x))
            loss: torch.Tensor = found.mean.square().mean() + found.variance.mean()
            return loss

    return Network(), (torch.randn(256, 16),), {}


@outside
def mamba() -> Sample:
    """mambapy: the parallel scan in Python."""
    from mambapy.mamba import Mamba, MambaConfig

    return Mamba(MambaConfig(d_model=64, n_layers=3)), (torch.randn(4, 64, 64),), {}


@outside
def wav2vec2() -> Sample:
    """transformers: layers dropped by random numbers."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    convolutions = {"conv_dim": (32, 32, 32), "conv_stride": (5, 2, 2), "conv_kernel": (10, 3, 3)}
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128}
    positions = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
    config = Wav2Vec2Config(vocab_size=32, layerdrop=0.1, mask_time_prob=0.0, **convolutions, **sizes, **positions)
    return Wav2Vec2ForCTC(config), (torch.randn(2, 4000),), {"labels": torch.randint(1, 32, (2, 10))}


@outside
def ibert() -> Sample:
    """transformers: checks every activation for NaN."""
    from transformers import IBertConfig, IBertForMaskedLM

    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}
    tokens = torch.randint(0, 256, (2, 64))
    return IBertForMaskedLM(IBertConfig(vocab_size=256, quant_mode=True, **sizes)), (tokens,), {"labels": tokens}


@outside
def jetmoe() -> Sample:
    """transformers: as many rows per expert as there are."""
    from transformers import JetMoeConfig, JetMoeForCausalLM

    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_key_value_heads": 2, "kv_channels": 16}
    config = JetMoeConfig(vocab_size=256, intermediate_size=128, num_local_experts=4, num_experts_per_tok=2, **sizes)
    tokens = torch.randint(0, 256, (2, 64))
    return JetMoeForCausalLM(config), (tokens,), {"labels": tokens, "use_cache": False}


@outside
def mixtral_loop() -> Sample:
    """transformers: as many rows per expert as there are, in a loop."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = MixtralConfig(vocab_size=256, intermediate_size=128, num_local_experts=4, **sizes)
    config._experts_implementation = "eager"
    tokens = torch.randint(0, 256, (2, 128))
    return MixtralForCausalLM(config), (tokens,), {"labels": tokens, "use_cache": False}
