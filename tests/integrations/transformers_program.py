"""What ``test_tensor_parallel`` runs under torchrun: a model that transformers loads by its own ``tp_plan``."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import lowtide
from tests.integrations.launch import say
from tests.integrations.scenarios import perform
from tests.support.training import QUICK

_SIZES: Mapping[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "use_cache": False,
}  # fmt: skip


def trained(folder: str, budget: int | None = None) -> tuple[Any, list[Any], list[int]]:
    """A model, the losses and gradients of its steps, and what each took."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model: Any = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", device_mesh=mesh).train()
    if budget is not None:
        lowtide.rematerialize(model, budget=budget, planner=QUICK, on_capture_error="error")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    generator, found, peaks = torch.Generator().manual_seed(1), list[Any](), list[int]()
    for _ in range(4):
        rows = torch.randint(_SIZES["vocab_size"], (4, 48), generator=generator)

        peaks.append(lowtide.measure(_step, model, rows, found).peak_bytes)
        found += [parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad.clone()
                  for parameter in model.parameters()]  # fmt: skip
        optimizer.step()
        optimizer.zero_grad()
    return model, found, peaks


def _step(model: Any, rows: torch.Tensor, losses: list[Any]) -> None:
    loss = model(input_ids=rows, labels=rows).loss
    loss.backward()
    losses.append(loss.detach())


def by_its_own_plan() -> None:
    """Layers whose ``forward`` is a function around the one that they had: equal to the bit, within the budget."""
    names: list[Any] = [None]
    if dist.get_rank() == 0:
        names = [tempfile.mkdtemp()]
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**_SIZES)).save_pretrained(names[0])
    dist.broadcast_object_list(names)
    _, theirs, alone = trained(names[0])
    budget = torch.tensor(0.6 * max(alone[1:]))
    dist.all_reduce(budget, op=dist.ReduceOp.MIN)
    model, ours, peaks = trained(names[0], int(budget))
    assert all(torch.equal(one, two) for one, two in zip(ours, theirs, strict=True))
    (plan,) = lowtide.plans(model)
    assert plan.overhead > 0
    assert max(peaks[1:]) <= plan.budget_bytes
    say(f"peaks {peaks}, predicted {plan.peak_bytes} of {plan.budget_bytes}, alone {alone}")


if __name__ == "__main__":
    perform(by_its_own_plan)
