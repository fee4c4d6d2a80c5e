"""Recurrent layers over packed sequences, as operators: to the bit as PyTorch computes them."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from lowtide.program.recurrent import KINDS, Recurrent

SIZES = [[5, 5, 4, 4, 2, 1], [3, 3, 1], [2, 1, 1, 1], [6, 5, 4, 3, 2, 1], [9, 9, 9, 8]]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(torch.int32)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("bias", "width"), [(True, 7), (False, 16), (True, 1)])
def test_equal_to_eager(kind: str, sizes: list[int], bias: bool, width: int) -> None:
    torch.manual_seed(sum(sizes))
    modules = {"lstm": nn.LSTM, "gru": nn.GRU}
    others = {"nonlinearity": kind.removeprefix("rnn_")} if kind not in modules else {}
    module = modules.get(kind, nn.RNN)(6, width, bias=bias, bidirectional=True, **others)
    states = 1 + (kind == "lstm")
    data = torch.randn(sum(sizes), 6, requires_grad=True)
    first = [torch.randn(2, sizes[0], width, requires_grad=True) for _ in range(states)]
    weights = module._flat_weights
    inputs = [data, *first, *weights]
    packed = nn.utils.rnn.PackedSequence(data, torch.tensor(sizes))
    theirs, last = module(packed, tuple(first) if states == 2 else first[0])
    expected = [theirs.data, *(last if states == 2 else (last,))]
    each = len(weights) // 2
    own = []
    for reverse in (0, 1):
        inner = [*(one[reverse] for one in first), *weights[each * reverse :][:each]]
        own.append(Recurrent.apply(kind, sizes, bool(reverse), states, data, *inner))
    results = [torch.cat([one[0] for one in own], -1)]
    results += [torch.stack([one[1 + place] for one in own]) for place in range(states)]
    for one, other in zip(results, expected, strict=True):
        assert torch.equal(_bits(one), _bits(other))
    tangents = [torch.randn_like(one) for one in expected]
    for count in range(1, len(expected) + 1):
        for chosen in itertools.combinations(range(len(expected)), count):
            gradients = [
                torch.autograd.grad(
                    [given[i] for i in chosen], inputs, [tangents[i] for i in chosen], retain_graph=True
                )
                for given in (results, expected)
            ]
            for one, other in zip(*gradients, strict=True):
                assert torch.equal(one, other)
