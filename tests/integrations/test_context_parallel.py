"""Context parallelism, which PyTorch cannot run on a CPU: a plan made outside of it is not taken for calls inside."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional

import lowtide


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(32, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.project(x).chunk(3, -1))
        return functional.scaled_dot_product_attention(*heads, is_causal=True).square().mean()


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_a_plan_from_outside_is_not_used_inside() -> None:
    """Its attention would be that of a rank's own tokens."""
    mesh, model, x = init_device_mesh("cpu", (1,)), _Attention(), torch.randn(2, 16, 32)
    lowtide.rematerialize(model, (x,), budget="100%", on_capture_error="error")
    model(x).backward()
    tokens = x.clone()
    inside = context_parallel(mesh, buffers=[tokens], buffer_seq_dims=[1])
    with inside, pytest.raises(lowtide.CaptureError, match="context_parallel"):
        model(tokens)
    model(x).backward()
    assert len(lowtide.plans(model)) == 1


@pytest.mark.usefixtures("one_rank")
def test_without_lowtide_there_is_none_on_a_cpu() -> None:
    """Once this fails, the guide and the refusal can be looked at again."""
    mesh, model, tokens = init_device_mesh("cpu", (1,)), _Attention(), torch.randn(2, 16, 32)
    inside = context_parallel(mesh, buffers=[tokens], buffer_seq_dims=[1])
    with inside, pytest.raises(NotImplementedError, match="flash_attention_for_cpu"):
        model(tokens)


def test_another_attention_is_another_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = _Attention(), torch.randn(2, 16, 32)
    lowtide.rematerialize(model, (x,), budget="100%")
    usual = model(x)
    own = functional.scaled_dot_product_attention
    monkeypatch.setattr(functional, "scaled_dot_product_attention", lambda q, k, v, **_: own(q, k, v))
    assert not torch.equal(model(x), usual)
    monkeypatch.undo()
    assert torch.equal(model(x), usual)
