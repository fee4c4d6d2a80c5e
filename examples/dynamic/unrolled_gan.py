"""An unrolled GAN: the generator is trained through several differentiable steps of the discriminator.

The generator learns eight points on a circle. How many steps are unrolled depends on how good the discriminator is.
Luke Metz et al., ICLR 2017, arXiv 1611.02163.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from examples.dynamic.program import Program, seeded

_LATENT, _WIDTH = 8, 32
_SAMPLES = 256
_MODES, _SPREAD = 8, 0.05
_UNROLLED, _UNROLLED_RATE, _BLIND_LOSS = 4, 0.1, 1.5
_LEARNING_RATE = 1e-3

_Weights = dict[str, torch.Tensor]


def make(size: int = 1, seed: int = 0) -> Program:
    """``size`` times 256 samples in a step."""
    with seeded(seed):
        generator = nn.Sequential(
            *_dense(_LATENT, _WIDTH, nn.BatchNorm1d(_WIDTH)),
            *_dense(_WIDTH, _WIDTH, nn.BatchNorm1d(_WIDTH)),
            nn.Linear(_WIDTH, 2),
        )
        discriminator = nn.Sequential(
            *_dense(2, _WIDTH, nn.Dropout(0.1)), *_dense(_WIDTH, _WIDTH, nn.Dropout(0.1)), nn.Linear(_WIDTH, 1)
        )
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=_LEARNING_RATE, betas=(0.5, 0.999))
    discriminator_optimizer = torch.optim.SGD(discriminator.parameters(), lr=_LEARNING_RATE, momentum=0.9)
    samples = _SAMPLES * size

    def step(index: int) -> tuple[torch.Tensor, ...]:
        real = _draw_real(samples)
        fake = generator(torch.randn(samples, _LATENT))

        generator_optimizer.zero_grad()
        weights = _unroll(discriminator, real, fake)
        answers = functional_call(discriminator, weights, (fake,))
        generator_loss = F.binary_cross_entropy_with_logits(answers, torch.ones_like(answers))
        generator_loss.backward()
        nn.utils.clip_grad_value_(generator.parameters(), 1.0)
        generator_optimizer.step()

        discriminator_optimizer.zero_grad()
        loss = _discriminator_loss(discriminator, dict(discriminator.named_parameters()), real, fake.detach())
        loss.backward()
        discriminator_optimizer.step()
        return generator_loss.detach(), loss.detach()

    return Program("unrolled_gan", (generator, discriminator), (generator_optimizer, discriminator_optimizer), step)


def _dense(inputs: int, outputs: int, between: nn.Module) -> tuple[nn.Module, ...]:
    return nn.Linear(inputs, outputs), between, nn.LeakyReLU(0.2, inplace=True)


def _unroll(discriminator: nn.Module, real: torch.Tensor, fake: torch.Tensor) -> _Weights:
    """The discriminator's weights after some steps, as a differentiable function of ``fake``."""
    weights: _Weights = dict(discriminator.named_parameters())
    for _ in range(_UNROLLED):
        loss = _discriminator_loss(discriminator, weights, real, fake)
        gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        weights = {
            name: weight - _UNROLLED_RATE * gradient
            for (name, weight), gradient in zip(weights.items(), gradients, strict=True)
        }
        if loss.item() > _BLIND_LOSS:
            break
    return weights


def _discriminator_loss(
    discriminator: nn.Module, weights: _Weights, real: torch.Tensor, fake: torch.Tensor
) -> torch.Tensor:
    real_answers = functional_call(discriminator, weights, (real,))
    fake_answers = functional_call(discriminator, weights, (fake,))
    return F.binary_cross_entropy_with_logits(
        real_answers, torch.ones_like(real_answers)
    ) + F.binary_cross_entropy_with_logits(fake_answers, torch.zeros_like(fake_answers))


def _draw_real(samples: int) -> torch.Tensor:
    """Points around the modes, (samples, 2), from the global generator."""
    angles = torch.randint(0, _MODES, (samples,)) * (2 * math.pi / _MODES)
    return torch.stack((angles.cos(), angles.sin()), dim=1).add_(_SPREAD * torch.randn(samples, 2))
