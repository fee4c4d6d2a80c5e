"""Row: sparse tensors in the COO layout that a model is given, holds or makes: graph networks with an adjacency."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from tests.support.networks import WIDTH, WithLoss
from tests.support.training import MINIMUM, compare_training, make

NODES = 60


def _adjacency(edges: int = 200, coalesced: bool = True, seed: int = 0) -> torch.Tensor:
    """Without multiple edges, so that coalescing changes no size."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.randperm(NODES * NODES, generator=generator)[:edges]
    made = torch.sparse_coo_tensor(
        torch.stack([places // NODES, places % NODES]), torch.rand(edges, generator=generator), (NODES, NODES),
        check_invariants=True,
    )  # fmt: skip
    return made.coalesce() if coalesced else made


def _rows(seed: int, nodes: int = NODES) -> torch.Tensor:
    return torch.randn(nodes, WIDTH, generator=torch.Generator().manual_seed(seed))


class _Graph(nn.Module):
    """Kipf's graph convolutions, with the product written in several ways."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
        products: list[Callable[..., torch.Tensor]] = [torch.sparse.mm, torch.mm, torch.matmul, torch.spmm]
        for number, layer in enumerate(self.layers):
            x = F.dropout(F.relu(products[number % 4](adjacency, layer(x))), 0.2)
        return (
            x
            + adjacency.t() @ x
            + 0.5 * adjacency.transpose(0, 1) @ x
            + torch.sparse.sum(adjacency, 1).to_dense()[:, None]
        )


@pytest.mark.parametrize("coalesced", [True, False])
def test_an_adjacency_is_an_argument(coalesced: bool) -> None:
    def inputs(seed: int) -> Any:
        return (_rows(seed), _adjacency(coalesced=coalesced, seed=seed)), {}

    compare_training(lambda: WithLoss(_Graph()), inputs, budgets=("70%", MINIMUM), quick=0)


def test_an_adjacency_that_no_backward_pass_reads() -> None:
    """Features are propagated first, which require no gradient."""

    class Simple(_Graph):
        def forward(self, x: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
            x = torch.sparse.mm(adjacency, torch.sparse.mm(adjacency, x))
            for layer in self.layers:
                x = layer(x).tanh()
            return x

    compare_training(
        lambda: WithLoss(Simple()),
        lambda seed: ((_rows(seed), _adjacency(seed=seed)), {}),
        budgets=("90%", MINIMUM),
        quick=0,
    )


class _Selecting(nn.Module):
    """Holds an adjacency, and depends on values: what it keeps is computed again as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH))
        self.register_buffer("adjacency", _adjacency())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.sparse.mm(self.adjacency, x).sin().cos().tanh().exp().log1p()
        x = x[torch.nonzero(x.sum(1) > -1e9).flatten()]
        return x + self.inner(x)


def test_an_adjacency_of_what_runs_again_as_a_whole(caplog: pytest.LogCaptureFixture) -> None:
    plain, planned = (make(lambda: nn.Sequential(*(_Selecting() for _ in range(6)))) for _ in range(2))
    lowtide.rematerialize(planned, (_rows(0),), budget="55%")
    for seed in range(3):
        losses = [model(_rows(seed)).square().mean() for model in (plain, planned)]
        for loss in losses:
            loss.backward()
        assert torch.equal(*losses)
    assert "run again in the backward pass" in caplog.text
    for one, two in zip(plain.parameters(), planned.parameters(), strict=True):
        assert one.grad is not None and two.grad is not None and torch.equal(one.grad, two.grad)


@pytest.mark.parametrize(
    "options", [{"compiler": "inductor"}, {"arena": True}], ids=["kernels", "arena"]
)  # kernels add in another order
def test_beside_other_settings(options: dict[str, Any]) -> None:
    """Kernels add in another order."""
    compare_training(
        lambda: WithLoss(_Graph(2)),
        lambda seed: ((_rows(seed), _adjacency()), {}),
        budgets=("80%",),
        tolerance=1e-5 if "compiler" in options else 0.0,
        **options,
    )


def test_another_number_of_edges_has_a_plan_of_its_own() -> None:
    def inputs(seed: int) -> Any:
        return (_rows(seed),), {"adjacency": _adjacency(200 + 100 * (seed % 2))}

    (outcome,) = compare_training(lambda: WithLoss(_Graph()), inputs, budgets=("70%",), iterations=4)
    assert len(lowtide.plans(outcome.model)) == 2


class _Holding(nn.Module):
    def __init__(self, registered: bool) -> None:
        super().__init__()
        self.inner = _Graph()
        if registered:
            self.register_buffer("adjacency", _adjacency(), persistent=False)
        else:
            self.adjacency = _adjacency()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x, self.adjacency)


@pytest.mark.parametrize("registered", [True, False], ids=["buffer", "attribute"])
def test_an_adjacency_is_held(registered: bool) -> None:
    compare_training(
        lambda: WithLoss(_Holding(registered)), lambda seed: ((_rows(seed),), {}), budgets=("70%", MINIMUM), quick=0
    )


class _Making(nn.Module):
    """Makes its adjacency of edges, whose weights are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _Graph(2)
        self.weights = nn.Parameter(torch.rand(200))

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        fixed = torch.sparse_coo_tensor(
            edges, self.weights.detach(), (NODES, NODES), is_coalesced=True, check_invariants=False
        )
        return self.inner(x, fixed) * self.weights.mean()


def test_an_adjacency_is_made() -> None:
    edges = _adjacency().indices()
    compare_training(
        lambda: WithLoss(_Making()), lambda seed: ((_rows(seed), edges), {}), budgets=("70%", MINIMUM), quick=0
    )


class _Sized(nn.Module):
    """Makes an adjacency as large as its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _Graph(2)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        weights = torch.ones(edges.shape[1])
        made = torch.sparse_coo_tensor(edges, weights, (len(x), len(x)), is_coalesced=False, check_invariants=False)
        return self.inner(x, made)


def test_an_adjacency_of_another_size_is_made() -> None:
    """Sizes are numbers within what is made again: no program of symbolic ones stands for it."""

    def inputs(seed: int) -> Any:
        nodes = NODES + 3 * seed
        edges = torch.randint(0, nodes, (2, 200 + 7 * seed), generator=torch.Generator().manual_seed(seed))
        return (_rows(seed, nodes), edges), {}

    compare_training(lambda: WithLoss(_Sized()), inputs, budgets=("100%",), iterations=5)


def test_the_attribute_is_exchanged() -> None:
    torch.manual_seed(0)
    plain, model = WithLoss(_Holding(False)), WithLoss(_Holding(False))
    model.load_state_dict(plain.state_dict())
    lowtide.rematerialize(model, (_rows(0),), budget="100%")
    for seed in range(3):
        losses = []
        for each in (plain, model):
            each.body.adjacency = _adjacency(seed=seed)  # type: ignore[union-attr]
            torch.manual_seed(seed)
            losses.append(each(_rows(seed)))
            losses[-1].backward()
        assert torch.equal(*losses)
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(one.grad, other.grad) for one, other in pairs)  # type: ignore[arg-type]


class _Values(_Graph):
    def forward(self, x: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
        return super().forward(x, adjacency) * adjacency.values().sum()


class _Softmax(_Graph):
    """An operator that asks for the number of entries, which fake tensors do not have."""

    def forward(self, x: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
        return super().forward(x, torch.sparse.softmax(adjacency, 1))


class _Counting(_Graph):
    def forward(self, x: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
        return super().forward(x, adjacency) / adjacency._nnz()


class _Returning(_Graph):
    def forward(self, x: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
        return super().forward(x, adjacency), adjacency.t()  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("make", "adjacency", "said"),
    [
        (_Values, _adjacency, "can only multiply"),
        (_Softmax, _adjacency, "can only multiply"),
        (_Counting, _adjacency, "how many entries"),
        (_Returning, _adjacency, "makes a sparse tensor"),
        (_Graph, lambda: _adjacency().requires_grad_(), "cannot be captured"),
        (_Graph, lambda: _adjacency().to_sparse_csr(), "cannot be captured"),
    ],
    ids=["values", "softmax", "entries", "returned", "with a gradient", "another layout"],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_what_is_refused(make: Callable[[], nn.Module], adjacency: Callable[[], torch.Tensor], said: str) -> None:
    with pytest.raises(lowtide.CaptureError, match=said):
        lowtide.rematerialize(make(), (_rows(0), adjacency()), budget="100%", on_capture_error="error")
