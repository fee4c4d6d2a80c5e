"""Densities, codebooks, diffusion, tables, recommendations and series."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.outside_models.register import outside
from benchmarks.zoo import Sample


@outside("nflows")
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


@outside("normflows")
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


@outside("gpytorch")
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


@outside("zuko")
def neural_spline_flow() -> Sample:
    """Returns a distribution that depends on a context."""
    import zuko

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.flow = zuko.flows.NSF(6, 4, transforms=3, hidden_features=(64, 64))

        def forward(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = -self.flow(given).log_prob(x).mean()
            return loss

    return Network(), (torch.randn(256, 6), torch.randn(256, 4)), {}


@outside("vector-quantize-pytorch")
def residual_quantizer() -> Sample:
    """Codebooks that learn while they run, made by k-means from the first batch, layers dropped at random."""
    from vector_quantize_pytorch import ResidualVQ

    sizes = {"dim": 64, "num_quantizers": 3, "codebook_size": 32, "kmeans_init": True, "kmeans_iters": 3}
    model = nn.Sequential(nn.Linear(64, 64), ResidualVQ(**sizes, threshold_ema_dead_code=2, quantize_dropout=True))
    return model, (torch.randn(4, 64, 64),), {}


@outside("denoising-diffusion-pytorch")
def denoising_diffusion() -> Sample:
    """Draws times and noise, conditions on itself by Python's random numbers."""
    from denoising_diffusion_pytorch import GaussianDiffusion, Unet

    net = Unet(dim=16, dim_mults=(1, 2), flash_attn=False, self_condition=True)
    return GaussianDiffusion(net, image_size=16, timesteps=100), (torch.rand(4, 3, 16, 16),), {}


@outside("bayesian-torch")
def bayesian_layers() -> Sample:
    """Draws weights in every call; returns pairs."""
    from bayesian_torch.layers import LinearReparameterization

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = LinearReparameterization(64, 128), LinearReparameterization(128, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x, one = self.first(x)
            x, two = self.last(x.relu())
            return x.square().mean() + (one + two) / 1000

    return Network(), (torch.randn(256, 64),), {}


@outside("pytorch-tabnet")
def tabnet() -> Sample:
    from pytorch_tabnet.tab_network import TabNet

    model = TabNet(16, 3, n_d=16, n_a=16, n_steps=3, group_attention_matrix=torch.eye(16), virtual_batch_size=64)
    return model, (torch.randn(256, 16),), {}


@outside("tab-transformer-pytorch")
def feature_transformer() -> Sample:
    from tab_transformer_pytorch import FTTransformer

    model = FTTransformer(
        categories=(10, 5, 6), num_continuous=8, dim=32, dim_out=1, depth=3, heads=4, attn_dropout=0.1
    )
    return model, (torch.randint(0, 5, (64, 3)), torch.randn(64, 8)), {}


@outside("pytorch-tcn")
def temporal_convolutions() -> Sample:
    from pytorch_tcn import TCN

    return TCN(8, [32, 32, 32], use_norm="weight_norm", dropout=0.1), (torch.randn(4, 8, 200),), {}


@outside("iTransformer")
def inverted_transformer() -> Sample:
    """Normalises reversibly."""
    from iTransformer import iTransformer

    sizes = {"num_variates": 20, "lookback_len": 48, "dim": 64, "depth": 2, "heads": 4, "dim_head": 16}
    return iTransformer(**sizes, pred_length=(6, 12), use_reversible_instance_norm=True), (torch.randn(8, 48, 20),), {}


@outside("entmax")
def sparse_attention() -> Sample:
    """Custom functions that sort."""
    from entmax import entmax15

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.queries, self.values = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return entmax15(self.queries(x) @ x.mT / 8, dim=-1) @ self.values(x)

    return Network(), (torch.randn(4, 64, 64),), {}


@outside("geoopt")
def hyperbolic_network() -> Sample:
    """Parameters on a manifold, which are a subclass of Parameter."""
    import geoopt

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ball = geoopt.PoincareBall()
            self.points = geoopt.ManifoldParameter(torch.randn(16, 8) / 10, manifold=self.ball)
            self.net = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            placed = self.ball.expmap0(self.net(x) / 10)
            distances: torch.Tensor = self.ball.dist(placed.unsqueeze(1), self.points)
            return distances.mean()

    return Network(), (torch.randn(128, 32),), {}


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


@outside("pythae")
def riemannian_autoencoder() -> Sample:
    """Steps along gradients of a Hamiltonian; what it has seen is kept; returns dictionaries of a class of its own."""
    from pythae.models import RHVAE, RHVAEConfig

    model = RHVAE(RHVAEConfig(input_dim=(1, 28, 28), latent_dim=4, n_lf=2))
    return model, ({"data": torch.rand(32, 1, 28, 28)},), {}


@outside("rectified-flow-pytorch")
def rectified_flow() -> Sample:
    """Straight paths from noise to images."""
    from rectified_flow_pytorch import RectifiedFlow, Unet

    return RectifiedFlow(Unet(dim=16, dim_mults=(1, 2))), (torch.rand(4, 3, 32, 32),), {}


@outside("blitz-bayesian-pytorch")
def bayesian_recurrence() -> Sample:
    """Weights are drawn in every call; the loss is of several calls, and of what the layers keep of their densities."""
    from blitz.modules import BayesianLSTM
    from blitz.utils import variational_estimator

    @variational_estimator
    class Series(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recurrence, self.last = BayesianLSTM(1, 16, prior_sigma_1=1, prior_pi=1), nn.Linear(16, 1)

        def forward(self, x: torch.Tensor) -> Any:
            return self.last(self.recurrence(x)[0][:, -1])

    class Bound(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.series: Any = Series()

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            return self.series.sample_elbo(x, y, nn.MSELoss(), sample_nbr=3, complexity_cost_weight=1e-3)

    return Bound(), (torch.randn(32, 20, 1), torch.randn(32, 1)), {}
