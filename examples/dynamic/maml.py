"""Model-agnostic meta-learning: gradients through gradient steps, by double backward.

Each task is a sine curve; the inner loop takes steps on one half of its points until the loss is small or the steps are
used up, the outer loss is on the other half. Gradients of the tasks of a batch accumulate. Chelsea Finn et al., ICML
2017, arXiv 1703.03400.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from examples.dynamic.program import Program, seeded

_WIDTH = 24
_POINTS = 256
_TASKS = 2
_INNER_STEPS, _INNER_RATE, _GOOD_LOSS = 3, 0.05, 0.5
_LEARNING_RATE = 1e-3

_Weights = dict[str, torch.Tensor]


def make(size: int = 1, seed: int = 0) -> Program:
    """``size`` times 256 points in each half of a task."""
    with seeded(seed):
        model = nn.Sequential(
            nn.Linear(1, _WIDTH),
            nn.Tanh(),
            nn.Linear(_WIDTH, _WIDTH),
            nn.Tanh(),
            nn.Dropout(0.05),
            nn.Linear(_WIDTH, 1),
        )
    optimizer = torch.optim.Adam(model.parameters(), lr=_LEARNING_RATE)
    points = _POINTS * size

    def step(index: int) -> tuple[torch.Tensor, ...]:
        optimizer.zero_grad()
        losses = []
        for _ in range(_TASKS):
            task = _draw_task(points)
            weights = _adapt(model, dict(model.named_parameters()), *task[:2])
            loss = _loss(model, weights, *task[2:]) / _TASKS
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        return tuple(losses)

    return Program("maml", (model,), (optimizer,), step)


def _adapt(model: nn.Module, weights: _Weights, x: torch.Tensor, y: torch.Tensor) -> _Weights:
    """The weights after a few differentiable gradient steps, fewer where the task is easy."""
    for _ in range(_INNER_STEPS):
        loss = _loss(model, weights, x, y)
        if loss.item() < _GOOD_LOSS:
            break
        gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        weights = {
            name: weight - _INNER_RATE * gradient
            for (name, weight), gradient in zip(weights.items(), gradients, strict=True)
        }
    return weights


def _loss(model: nn.Module, weights: _Weights, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(functional_call(model, weights, (x,)), y)


def _draw_task(points: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs and targets of the inner half, then of the outer half; each (points, 1), from the global generator."""
    amplitude, phase = 0.1 + 4.9 * torch.rand(()), math.pi * torch.rand(())
    x = torch.empty(2 * points, 1).uniform_(-5, 5)
    y = amplitude * torch.sin(x + phase)
    return x[:points], y[:points], x[points:], y[points:]
