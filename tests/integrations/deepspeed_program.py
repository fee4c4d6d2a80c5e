"""What ``test_deepspeed`` runs under torchrun: DeepSpeed's ZeRO, with and without plans."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

import lowtide
from tests.integrations.launch import say
from tests.integrations.scenarios import perform

_ROWS = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = (nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Dropout(0.1))
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def trained(
    stage: int, budget: int | str | None, *, before: bool = True, on_capture_error: str = "parts"
) -> tuple[Any, list[float], list[int]]:
    """The model, losses and norms, and peaks."""
    torch.manual_seed(0)
    model = Model()
    options: dict[str, Any] = {"budget": budget, "planner": "auto{effort=1}", "planning": "wait"}
    options["on_capture_error"] = on_capture_error
    if budget is not None and before:
        lowtide.rematerialize(model, **options)
    zero = {"stage": stage, "reduce_bucket_size": 50_000, "allgather_bucket_size": 50_000}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    config = {"train_micro_batch_size_per_gpu": _ROWS, "zero_optimization": zero, "optimizer": optimizer}
    engine, *_ = deepspeed.initialize(model=model, config=config | {"gradient_clipping": 1.0})
    if budget is not None and not before:
        lowtide.rematerialize(engine.module, **options)
    torch.manual_seed(5 + dist.get_rank())
    losses, peaks = [], []
    for x in torch.randn(5, _ROWS, 32, 64):

        def compute(x: torch.Tensor = x) -> None:
            loss = engine(x)
            engine.backward(loss)
            losses.append(loss.item())

        peaks.append(lowtide.measure(compute).peak_bytes)
        engine.step()
        losses.append(float(engine.get_global_grad_norm()))
    return model, losses, peaks


def stages_1_and_2() -> None:
    """Equal to the bit, planned before ``deepspeed.initialize`` or after it; buckets are outside of the budget."""
    for stage in (1, 2):
        _, expected, alone = trained(stage, None)
        for before in (True, False):
            model, losses, peaks = trained(stage, "50%", before=before)
            assert losses == expected, (losses, expected)
            plan = lowtide.plans(model)[-1]
            assert plan.overhead > 0
            assert max(peaks[2:]) < max(alone)
            say(f"stage {stage}: peaks {peaks}, planned {plan.peak_bytes}, alone {alone}")


def stage_3() -> None:
    """Is refused: what a plan would compute with is there only inside of DeepSpeed's hooks."""
    try:
        trained(3, "50%", on_capture_error="error")
    except lowtide.CaptureError as error:
        assert "ZeRO stage 3" in str(error)
    else:
        raise AssertionError("partitioned parameters were planned")


if __name__ == "__main__":
    perform(stages_1_and_2, stage_3)
