"""Graphs, molecules and their potentials, differential equations, spikes, transforms."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.outside_models.language import tokens
from benchmarks.outside_models.register import outside
from benchmarks.zoo import Sample, image


@outside("torch_geometric")
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


@outside("e3nn")
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


@outside("torchdiffeq")
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


@outside("torch_geometric")
def graph_attention() -> Sample:
    """Attention over edges, with batch norm; called with tensors."""
    from torch_geometric.nn import GAT

    edges = torch.randint(0, 500, (2, 3000))
    return GAT(32, 64, 3, 8, heads=4, dropout=0.2, norm="batch_norm"), (torch.randn(500, 32), edges), {}


@outside("torch_geometric")
def point_transformer() -> Sample:
    """Neighbours and pooling by batch."""
    from torch_geometric.nn import PointTransformerConv, global_max_pool

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = PointTransformerConv(3, 32), PointTransformerConv(32, 64)

        def forward(self, place: torch.Tensor, edges: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
            x = self.first(place, place, edges).relu()
            pooled: torch.Tensor = global_max_pool(self.second(x, place, edges), batch)
            return pooled

    edges, batch = torch.randint(0, 256, (2, 2000)), torch.arange(4).repeat_interleave(64)
    return Network(), (torch.randn(256, 3), edges, batch), {}


@outside("egnn-pytorch")
def equivariant_graph() -> Sample:
    from egnn_pytorch import EGNN_Network

    model = EGNN_Network(num_tokens=20, dim=32, depth=3, num_nearest_neighbors=8, coor_weights_clamp_value=2.0)
    return model, (torch.randint(0, 20, (2, 32)), torch.randn(2, 32, 3)), {"mask": torch.ones(2, 32).bool()}


@outside("invariant-point-attention")
def invariant_point_attention() -> Sample:
    from invariant_point_attention import IPABlock

    rotations, places = torch.eye(3).expand(2, 32, 3, 3).clone(), torch.randn(2, 32, 3)
    arguments = {"pairwise_repr": torch.randn(2, 32, 32, 16), "rotations": rotations, "translations": places}
    return IPABlock(dim=32, heads=4, pairwise_repr_dim=16), (torch.randn(2, 32, 32),), arguments


@outside("neuraloperator")
def fourier_operator() -> Sample:
    """Complex weights and Fourier transforms."""
    from neuralop.models import FNO

    return FNO(n_modes=(8, 8), hidden_channels=16, in_channels=1, out_channels=1, n_layers=3), (image(2, 32, 1),), {}


@outside("torchsde")
def stochastic_equation() -> Sample:
    """A Brownian motion that draws from a generator of its own."""
    import torchsde

    class Field(nn.Module):
        noise_type, sde_type = "diagonal", "ito"

        def __init__(self) -> None:
            super().__init__()
            self.drift, self.spread = (
                nn.Sequential(nn.Linear(16, 128), nn.Tanh(), nn.Linear(128, 16)),
                nn.Linear(16, 16),
            )

        def f(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.drift(y)
            return result

        def g(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.spread(y).sigmoid()

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.field = Field()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            motion = torchsde.BrownianInterval(0.0, 1.0, size=(64, 16), entropy=1)
            result: torch.Tensor = torchsde.sdeint(
                self.field, x, torch.tensor([0.0, 1.0]), bm=motion, dt=0.1, method="euler"
            )
            return result

    return Network(), (torch.randn(64, 16),), {}


@outside("siren-pytorch")
def siren() -> Sample:
    from siren_pytorch import SirenNet

    return SirenNet(dim_in=2, dim_hidden=128, dim_out=3, num_layers=4, w0_initial=30.0), (torch.rand(1024, 2),), {}


@outside("ncps")
def liquid_network() -> Sample:
    """A wired recurrence in a loop of Python."""
    from ncps.torch import CfC
    from ncps.wirings import AutoNCP

    return CfC(8, AutoNCP(24, 4)), (torch.randn(16, 12, 8),), {}


@outside("snntorch")
def spiking_network() -> Sample:
    """Spikes with surrogate gradients; membranes are kept from step to step."""
    import snntorch

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(64, 256), nn.Linear(256, 10)
            self.spikes, self.out = snntorch.Leaky(beta=0.9, learn_beta=True), snntorch.Leaky(beta=0.8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden, end, found = self.spikes.init_leaky(), self.out.init_leaky(), []
            for _ in range(8):
                spikes, hidden = self.spikes(self.first(x), hidden)
                _, end = self.out(self.last(spikes), end)
                found.append(end)
            return torch.stack(found)

    return Network(), (torch.randn(64, 64),), {}


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


@outside("spikingjelly")
def leaky_neurons() -> Sample:
    """Neurons that keep a potential from step to step, and are reset by the model."""
    from spikingjelly.activation_based import functional, layer, neuron, surrogate

    def block(before: int, after: int, kind: Any) -> list[nn.Module]:
        return [
            layer.Conv2d(before, after, 3, padding=1),
            layer.BatchNorm2d(after),
            kind(surrogate_function=surrogate.ATan()),
        ]

    body = [*block(3, 16, neuron.LIFNode), layer.MaxPool2d(2), *block(16, 32, neuron.ParametricLIFNode)]

    class Spiking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(*body, layer.AdaptiveAvgPool2d(1), layer.Flatten(), layer.Linear(32, 10))
            functional.set_step_mode(self.net, "m")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            functional.reset_net(self.net)
            rate: torch.Tensor = self.net(x.expand(4, *x.shape)).mean(0)
            return rate

    return Spiking(), (image(8, 32),), {}
