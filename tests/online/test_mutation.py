"""Mutations happen once: in-place operators, views of what is mutated, running statistics, random numbers."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from tests.online.scenarios import ROWS, WIDTH, Scenario, Training, chain, compare

Mutation = Callable[[torch.Tensor], Any]


def _write_out(tensor: torch.Tensor) -> None:
    torch.add(tensor, 1, out=tensor)


def _slice(tensor: torch.Tensor) -> None:
    tensor[:, 1:7] = 0.5


def _mask(tensor: torch.Tensor) -> None:
    tensor[tensor > 0] = -1


def _augmented(tensor: torch.Tensor) -> None:
    tensor += 1


def _through_data(tensor: torch.Tensor) -> None:
    tensor.data.mul_(2)


def _swapped(tensor: torch.Tensor) -> None:
    tensor.data = tensor * 3


MUTATIONS: dict[str, Mutation] = {
    "add_": lambda tensor: tensor.add_(1),
    "augmented": _augmented,
    "zero_": lambda tensor: tensor.zero_(),
    "copy_": lambda tensor: tensor.copy_(torch.ones_like(tensor)),
    "slice": _slice,
    "mask": _mask,
    "view": lambda tensor: tensor.view(-1)[5:50].mul_(3),
    "transposed": lambda tensor: tensor.t()[4].add_(2),
    "diagonal": lambda tensor: tensor.diagonal().fill_(4),
    "strided": lambda tensor: tensor.as_strided((8, 8), (3, 5), 2).neg_(),
    "split": lambda tensor: [part.add_(index) for index, part in enumerate(tensor.split(50))],
    "unbind": lambda tensor: tensor.unbind()[3].zero_(),
    "out": _write_out,
    "index_add_": lambda tensor: tensor.index_add_(0, torch.tensor([1, 1, 5]), torch.ones(3, WIDTH)),
    "scatter_": lambda tensor: tensor.scatter_(1, torch.zeros(ROWS, 1, dtype=torch.long), 9.0),
    "random": lambda tensor: tensor.normal_(),
    "dropout": lambda tensor: nn.functional.dropout(tensor, 0.5, inplace=True),
    "data": _through_data,
    "swap": _swapped,
    "foreach": lambda tensor: torch._foreach_add_([tensor, tensor.view(-1)[:100]], 1.0),
    "detached": lambda tensor: tensor.detach().sub_(1),
    "transpose_": lambda tensor: tensor.transpose_(0, 1).add_(1).transpose_(0, 1),
    "resize_": lambda tensor: tensor.resize_(ROWS // 2, 2 * WIDTH).resize_(ROWS, WIDTH),
    "clamp and relu": lambda tensor: tensor.clamp_(-0.5, 0.5).relu_(),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutated_once_with_live_views(name: str) -> None:
    """Views and results made before and after the mutation have the values that they have in eager."""

    def setup() -> Scenario:
        def scenario() -> Any:
            tensors = chain(LENGTH)
            views = [tensor.view(-1)[10:5000] for tensor in tensors]
            before = [tensor * 2 for tensor in tensors]
            for tensor in tensors[1::2]:
                MUTATIONS[name](tensor)
            after = [tensor * 3 for tensor in tensors]
            for tensor in tensors[::3]:
                MUTATIONS[name](tensor)
            everything = itertools.chain(tensors, views, before, after)
            return [tensor.sum().item() for tensor in everything], torch.rand(3)

        return scenario

    compare(setup, share=50)


LENGTH = 10


def test_mutation_of_a_view_that_outlives_its_base() -> None:
    def setup() -> Scenario:
        def scenario() -> Any:
            halves = [tensor[ROWS // 2 :] for tensor in chain()]
            for half in halves:
                half[0].add_(1)
            return [half.sum().item() for half in halves]

        return scenario

    compare(setup)


def test_mutation_of_what_others_are_made_of() -> None:
    """The rest of a chain is rebuilt from what its source was, not from what it is."""

    def setup() -> Scenario:
        def scenario() -> Any:
            tensors = chain()
            for tensor in tensors[:8]:
                tensor.mul_(0)
            return [tensor.sum().item() for tensor in reversed(tensors)]

        return scenario

    compare(setup)


def test_mutation_of_tensors_made_outside() -> None:
    """Parameters, buffers and inputs are there when the context is entered and may change inside.

    Half of the results, or the old contents they are made of, have to be kept.
    """

    def setup() -> Scenario:
        outside = torch.ones(ROWS, WIDTH)
        scale = torch.full((), 2.0)

        def scenario() -> Any:
            results = []
            for _ in range(12):
                results.append(outside * scale)
                results.append(results[-1].tanh())
                outside.add_(0.01)
                scale.mul_(1.1)
                outside[3:5] = 0
            return [tensor.sum().item() for tensor in results], outside, scale

        return scenario

    compare(setup, share=80)


def test_saved_tensors_that_were_mutated_are_refused_as_in_eager() -> None:
    """Eviction and rebuilding leave version counters alone; a real mutation is still noticed."""

    def setup() -> Scenario:
        training = Training()

        def scenario() -> Any:
            hidden = training.model[:4](training.data[0])
            squared = hidden.square()
            loss = training.model[4:](squared).sum()
            hidden.add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
            del hidden, squared, loss
            return training.steps(), training.state(), [p._version for p in training.model.parameters()]

        return scenario

    compare(setup)


def test_gradients_through_mutated_views() -> None:
    def setup() -> Scenario:
        weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
        data = torch.randn(ROWS, WIDTH)

        def scenario() -> Any:
            x = data @ weight
            for index in range(12):
                x = torch.tanh(x * 1.1)
                left, right = x.chunk(2, dim=1)
                gate = torch.sigmoid(left)
                right = right * gate
                y = torch.zeros_like(x)
                y[:, : WIDTH // 2] = left
                y[:, WIDTH // 2 :].add_(right).mul_(1 + index / 10)
                y.t()[3].copy_(gate[:, 0])
                x = y.relu_() if index % 2 else y
            x.sum().backward()
            return weight.grad, x.sum().item()

        return scenario

    compare(setup)


def test_running_statistics_and_generator() -> None:
    def setup() -> Scenario:
        training = Training()

        def scenario() -> Any:
            losses = training.steps(4)
            counts = [int(block.norm.num_batches_tracked) for block in training.blocks]
            assert counts == [4] * 8
            return losses, training.state(), torch.rand(5)

        return scenario

    statistics = compare(setup, share=50)
    assert statistics.rematerializations > 0


def test_random_operators_and_generators_of_their_own() -> None:
    def setup() -> Scenario:
        own = torch.Generator().manual_seed(7)

        def scenario() -> Any:
            tensors = []
            for index in range(6):
                tensors.append(torch.randn(ROWS, WIDTH))
                tensors.append(torch.rand(ROWS, WIDTH, generator=own))
                tensors.append(torch.bernoulli(tensors[-1]))
                tensors.append(torch.empty(ROWS, WIDTH).uniform_(-1, 1, generator=own))
                tensors.append(torch.randperm(ROWS * WIDTH // 2))
                tensors.append(nn.functional.dropout(tensors[-2], 0.3) + index)
                if index == 3:
                    torch.manual_seed(11)
                    own.manual_seed(12)
            return [tensor.sum().item() for tensor in tensors], own.get_state(), torch.rand(3)

        return scenario

    compare(setup)


def test_what_cannot_be_repeated_is_not() -> None:
    """An operator of the user's with a counter inside runs as often as in eager."""
    calls = [0]

    @torch.library.custom_op("lowtide_tests::counted", mutates_args=())
    def counted(x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return x + calls[0]

    @counted.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    def setup() -> Scenario:
        calls[0] = 0
        source = torch.zeros(ROWS, WIDTH)

        def scenario() -> Any:
            tensors = []
            for _ in range(6):
                tensors.append(counted(source))
                tensors.extend(tensors[-1] * index for index in range(5))
            return [tensor.sum().item() for tensor in tensors], calls[0]

        return scenario

    compare(setup, share=60)


@pytest.mark.parametrize("refilled", [False, True])
def test_what_was_computed_from_a_storage_that_is_resized(refilled: bool) -> None:
    """As reversible networks give the memory of their inputs back, and take it again."""
    x = torch.randn(ROWS, WIDTH)

    def program() -> list[torch.Tensor]:
        h = x * 3
        y = h.sin()
        h.untyped_storage().resize_(0)
        if refilled:
            h.untyped_storage().resize_(h.nbytes)
            ctypes.memset(h.data_ptr(), 1, h.nbytes)
        first = x.repeat(5, 1)
        second = x.repeat(5, 1)  # for which the least recently used goes
        return [each.mean() for each in (second, first, y)]

    expected = program()
    with lowtide.online(x.nbytes * (23 if refilled else 21) // 2, heuristic="lru", sample=False) as session:
        found = program()
    assert session.statistics.evictions > 0
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("unseen", [False, True])
def test_an_input_is_written_from_which_more_was_computed_than_there_is_room_for(unseen: bool) -> None:
    """Its old contents are kept aside, of which the results are computed again."""
    source = torch.randn(ROWS, WIDTH)

    def setup() -> Scenario:
        def scenario() -> Any:
            tensors = [source * index for index in range(1, 9)]
            (source.data if unseen else source).add_(1)
            found = [tensor[::7] + tensor.sum() for tensor in tensors], source.sum()
            source.sub_(1)
            return found

        return scenario

    for share in (40, 70):
        assert compare(setup, share, holds=True).copies == 1
