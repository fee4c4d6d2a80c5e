"""A diffusion step of diffusers' U-Net inside 50 % of its memory: ``python examples/unet.py``.

The loss is computed outside the model, so its bytes are left free with ``reserve``.
"""

from __future__ import annotations

import torch
from diffusers import DDPMScheduler, UNet2DModel
from torch.nn import functional

import lowtide

BATCH, SIZE, STEPS = 4, 32, 5


def main() -> None:
    torch.manual_seed(0)
    model = UNet2DModel(
        sample_size=SIZE, layers_per_block=1, block_out_channels=(32, 64), norm_num_groups=8, attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ).train()  # fmt: skip
    image_bytes = BATCH * 3 * SIZE * SIZE * 4
    lowtide.rematerialize(model, budget="50%", reserve=3 * image_bytes)

    scheduler = DDPMScheduler(num_train_timesteps=1000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(STEPS):
        clean, noise = torch.randn(2, BATCH, 3, SIZE, SIZE)
        times = torch.randint(0, 1000, (BATCH,))
        noisy = scheduler.add_noise(clean, noise, times)

        def compute(noisy: torch.Tensor = noisy, times: torch.Tensor = times, noise: torch.Tensor = noise) -> None:
            functional.mse_loss(model(noisy, times).sample, noise).backward()

        measured = lowtide.measure(compute)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step:  # the first step made the plan
            print(f"step {step + 1}: peak {measured.peak_bytes / 2**20:.1f} MiB")
    (plan,) = lowtide.plans(model)
    budget = plan.budget_bytes + 3 * image_bytes
    print(f"budget {budget / 2**20:.1f} of {plan.unconstrained_peak_bytes / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
