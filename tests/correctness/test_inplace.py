"""Row: in-place ReLU, in-place add, views, ``nn.Sequential``, ``Dropout(p=0)``."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

import lowtide
from lowtide.ir import Compute
from tests.support.networks import BATCH, WithLoss, perceptron, rows
from tests.support.training import MINIMUM, compare_training


def test_inplace_relu_in_sequential() -> None:
    compare_training(lambda: WithLoss(perceptron(6, activation=lambda: nn.ReLU(inplace=True))), rows())


def test_bare_sequential() -> None:
    compare_training(lambda: perceptron(6), rows())


def test_dropout_of_probability_zero() -> None:
    def network() -> nn.Module:
        return WithLoss(nn.Sequential(perceptron(3), nn.Dropout(0.0), perceptron(3), nn.Dropout(0.0, inplace=True)))

    compare_training(network, rows())


class _InPlace(nn.Module):
    """Sums, products and slices written in place, on results and on views of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        x += self.layers[1](x.tanh())
        x.mul_(0.5).add_(1.0)
        y = self.layers[2](torch.sin(x))
        y[:, :8] = torch.relu(y[:, 8:16]) + 1
        y[:, 16:].clamp_(min=-0.5)
        z = torch.zeros_like(y)
        z[::2] = self.layers[3](y)[::2]
        z.index_add_(0, torch.arange(4), y[:4])
        return self.layers[4](z.masked_fill_(z > 2, 0.0))


def test_inplace_arithmetic_and_slices() -> None:
    compare_training(lambda: WithLoss(_InPlace()), rows(), budgets=("70%", MINIMUM))


class _Sliced(nn.Module):
    """Writes into slices and rows of what it does not read before."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            h = self.up(x) * 2
            h[:, :32].add_(x)
            h[0] = x[0].mean()
            h[:, 32:].sigmoid_()
            x = torch.tanh(self.down(h))
        return x


def test_slices_are_written_in_place() -> None:
    (outcome,) = compare_training(lambda: WithLoss(_Sliced()), rows(), budgets=("90%",), planner="auto")
    (plan,) = lowtide.plans(outcome.model)
    writing = {step.op for step in plan.schedule.steps if isinstance(step, Compute) and step.into is not None}
    targets = {plan.graph.ops[op].target for op in writing}
    assert {"aten.slice_scatter.default", "aten.select_scatter.default"} <= targets


class _Indexed(nn.Module):
    """Sums over the edges of a graph, what an index or a mask puts in place, and selections, whose gradients are sums."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(5))
        torch.manual_seed(3)
        self.register_buffer("edges", torch.randint(0, BATCH, (3 * BATCH,)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.edges[:, None].expand(-1, 32)
        for layer in self.layers:
            y = layer(x)
            mixed = torch.tanh(y[self.edges] * y.index_select(0, self.edges) + y.gather(0, wide))
            x = y.new_zeros(y.shape).index_add_(0, self.edges, mixed)
            x = x + y.new_zeros(y.shape).scatter_add_(0, wide, mixed)
            x = x + torch.zeros_like(y).scatter_reduce(0, wide, mixed, "amax") + torch.sin(y).masked_scatter(y > 0, y)
            x = x.clone().index_fill_(0, self.edges[:2], 0.5).index_put_((self.edges[3:4],), y[:1])
            x = (
                torch.sin(x).scatter(0, wide[:1], y[:1]).index_copy(0, self.edges[:1], y[:1])
                + torch.take(y, self.edges).sum()
            )
            x = torch.cos(x)
            x.diagonal().add_(1.0)
        return x


def test_indexed_sums_are_made_in_place() -> None:
    outcome, *_ = compare_training(lambda: WithLoss(_Indexed()), rows(), budgets=("100%", "50%"), planner="auto")
    (plan,) = lowtide.plans(outcome.model)
    writing = {step.op for step in plan.schedule.steps if isinstance(step, Compute) and step.into is not None}
    targets = {plan.graph.ops[op].target.split(".")[1] for op in writing}
    expected = {
        "index_add",
        "scatter_add",
        "index_put",
        "put",
        "index_fill",
        "scatter",
        "masked_scatter",
        "diagonal_scatter",
    }
    assert expected <= targets, expected - targets


def test_indices_that_are_written_by_themselves() -> None:
    """PyTorch refuses to write in place into what it reads as an index."""

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(self.layer(x))
            order = y.detach()[0].argsort()
            inverse = torch.empty_like(order).index_put((order,), torch.arange(32))
            again = inverse.index_put((inverse,), torch.arange(32))
            return (y * again).sum()

    compare_training(Network, rows(), budgets=("100%",), planner="auto")


def test_sums_into_zeros_take_no_more_than_in_eager() -> None:
    """Those of the forward pass, and those that are the gradient of what is selected."""

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
            selected = self.layer(x).index_select(0, edges[1])
            return torch.zeros_like(x).index_add_(0, edges[0], selected).sum()

    model, inputs = Network(), (torch.randn(400, 64), torch.randint(0, 400, (2, 20)))
    plain = lowtide.measure(lambda: model(*inputs).backward()).peak_bytes
    lowtide.rematerialize(model, inputs, budget="100%")
    assert lowtide.plans(model)[0].peak_bytes <= 1.1 * plain


class _Views(nn.Module):
    """Views of views, expanded, transposed and split tensors, several of them alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.out = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.out:
            q, k, v = self.qkv(x).view(-1, 3, 4, 8).unbind(1)
            scores = torch.softmax(q.transpose(0, 1) @ k.permute(1, 2, 0), -1)
            mixed = (scores @ v.transpose(0, 1)).transpose(0, 1).reshape(-1, 32)
            left, right = layer(mixed).chunk(2, dim=-1)
            x = x + torch.cat([right, left.expand_as(left)], -1).view_as(x)[:, None].squeeze(1)
        return x.T.contiguous().T.unfold(0, 2, 2).mean(-1)


def test_views() -> None:
    compare_training(lambda: WithLoss(_Views()), rows(), budgets=("70%", MINIMUM), quick=0)


class _InputViews(nn.Module):
    """Results that are the input, a view of it, a parameter, or views of one another."""

    def __init__(self) -> None:
        super().__init__()
        self.body = perceptron(4)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = self.body(x)
        weight = self.body[0].weight
        return {
            "same": x,
            "view": x[:4],
            "y": y,
            "half": y[:, :16],
            "flat": y.view(-1),
            "weight": weight,
            "t": weight.t(),
        }


def test_results_that_alias_inputs_and_each_other() -> None:
    def loss(output: dict[str, torch.Tensor]) -> torch.Tensor:
        return output["y"].square().sum() + output["half"].sum() + (output["flat"] * 2).sum() + output["t"].sum()

    room_for_sums = 4 * (
        BATCH * 32 + BATCH * 16 + 32 * 32
    )  # of the gradients of y, its half and the weight's transpose
    compare_training(_InputViews, rows(), loss, budgets=("70%", MINIMUM), quick=0, unmet_bytes=room_for_sums)


class _MutatesArgument(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = perceptron(4)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        y = self.body(x + memory)
        memory.mul_(0.5).add_(y.detach().mean(0))
        return y.square().mean()


def test_argument_written_in_place() -> None:
    """The caller's tensor is written, as by eager: checked through the second and third iteration's losses."""
    memories: WeakKeyDictionary[nn.Module, torch.Tensor] = WeakKeyDictionary()  # an id would be used again

    def step(model: nn.Module, args: Any, kwargs: Any) -> Any:
        memory = memories.setdefault(model, torch.zeros(32))
        loss = model(args[0], memory)
        loss.backward()
        return loss, memory.clone()

    def inputs(iteration: int) -> Any:
        return (rows()(iteration)[0][0], torch.zeros(32)), {}

    compare_training(_MutatesArgument, inputs, step=step, check_peak=False)


class _Resized(nn.Module):
    """Makes tensors without elements, gives them their size, and writes into them and views of them."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = perceptron(4), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.last.weight
        kept = weight.data.new().resize_((weight.size(0), 1)).bernoulli_(0.5).expand_as(weight) / 0.5
        h = torch.nn.functional.linear(self.body(x), kept * weight, self.last.bias)
        larger = h.new_ones(4).resize_(4, 8)
        larger[:, 4:] = 3
        larger.view(-1)[4:].fill_(2).add_(1)
        smaller = x.new_ones(64)
        smaller.resize_(4, 8)[1, 2] = 9
        like = x.new_empty(0).resize_as_(h)
        like[:, :5], like[:, 5:] = 1, 0.5
        return (torch.tanh(h * larger.view(-1)) * smaller.view(-1) * like).square().mean()


def test_tensors_that_are_resized() -> None:
    compare_training(_Resized, rows(), budgets=("80%", MINIMUM), on_capture_error="error")


class _MadeOfConstants(nn.Module):
    """Writes into what operators make of tensors that the model holds in plain attributes, and reads these after that."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)
        self.table, self.indices = torch.randn(4, 32), {"all": torch.randint(0, 30, (4, 9))}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        copied = self.table[1:].clone()
        copied += 1
        summed = torch.stack([self.table, self.table]).sum(0)
        summed.sub_(self.table)
        filled = self.table.masked_fill(self.table > 0, 0).relu_()
        values, _ = self.table.sort(1)
        values[0] *= 2
        places = self.indices["all"].clone()
        places[0, :] += 1
        scattered = torch.zeros(4, 32).scatter_(1, places, 1.0)
        parts = [part.clone().mul_(2) for part in self.table.chunk(2)]
        held = torch.cat([copied, summed, filled, values, scattered, *parts, self.table])
        return (self.layer(x) @ held.t()).tanh()


def test_copies_of_what_a_model_holds() -> None:
    compare_training(lambda: WithLoss(_MadeOfConstants()), rows(), budgets=(MINIMUM,), on_capture_error="error")
