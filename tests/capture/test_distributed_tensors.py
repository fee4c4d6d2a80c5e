"""Distributed tensors in captured programs, seen from one rank of two that need not be there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import lowtide
from lowtide.capture import capture
from lowtide.cost import analytical_costs, measure_costs
from lowtide.cost.cache import CostCache
from lowtide.errors import CaptureError
from lowtide.program.distributed.collectives import Waited
from lowtide.program.distributed.local import form_of, hooked, version_of, whole_of
from lowtide.sharing.agreement import program_key


@pytest.fixture(params=[0, 1])
def mesh(request: pytest.FixtureRequest) -> Iterator[DeviceMesh]:
    """Of two ranks, this one being either."""
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def feed_forward(mesh: DeviceMesh) -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model


def test_inputs_and_gradients_are_local(mesh: DeviceMesh) -> None:
    program = capture(feed_forward(mesh), (torch.randn(4, 8),)).program
    shapes = [program.metas[value].shape for value in program.inputs if value is not None]
    assert shapes == [(16, 8), (16,), (8, 16), (8,), (4, 8)]
    assert {i: program.metas[value].shape for i, value in program.gradients} == dict(enumerate(shapes[:4]))
    assert {i: spec.placements for i, spec in program.placed} == {
        0: (Shard(0),), 1: (Shard(0),), 2: (Shard(1),), 3: (Replicate(),),
    }  # fmt: skip


def test_collectives_run_once_and_are_waited_for(mesh: DeviceMesh) -> None:
    x = torch.randn(4, 8, requires_grad=True)
    program = capture(feed_forward(mesh), (x,)).program
    found = [op for op in program.graph.ops if op.collective]
    assert [op.phase.value for op in found] == ["forward", "backward"]
    for op in found:
        assert op.once
        assert not op.recomputable
        assert isinstance(program.calls[op.id].target, Waited)
        (result,) = op.outputs
        assert program.graph.storages[program.graph.values[result].storage].base == op.id
    assert not any("wait_tensor" in op.target for op in program.graph.ops)


def test_collectives_are_not_run_to_be_measured(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Waited, *args: object) -> None:
        raise AssertionError(f"{self.operator} was run")

    program = capture(feed_forward(mesh), (torch.randn(4, 8),)).program
    (op,) = (op.id for op in program.graph.ops if op.collective)
    monkeypatch.setattr(Waited, "__call__", fail)
    costs = measure_costs(program, cache=CostCache(None))
    assert costs.time_ns[op] > 0
    assert costs.time_ns[op] == analytical_costs(program).time_ns[op]


def test_ranks_have_one_key_for_plans_though_each_keeps_another_part() -> None:
    keys = set()
    for rank in range(2):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        mesh = init_device_mesh("cpu", (2,))
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        plan = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0))
        parallelize_module(model, mesh, {"0": plan})
        keys.add(program_key(capture(model, (torch.randn(4, 8, requires_grad=True),)).program, ()))
        dist.destroy_process_group()
    assert len(keys) == 1


def test_the_form_of_a_distributed_tensor(mesh: DeviceMesh) -> None:
    """It is one as long as the memory is, counts writes, and knows what it is of."""
    whole = nn.Parameter(distribute_tensor(torch.randn(4, 2), mesh, [Shard(0)]))
    form = form_of(whole)
    assert type(form) is torch.Tensor
    assert form.requires_grad
    assert form is form_of(whole)
    assert whole_of(form) is whole
    version = version_of(form)
    with torch.no_grad():
        whole.add_(1)
    assert version_of(form) == (version or 0) + 1
    assert form.data_ptr() == whole.to_local().data_ptr()
    whole.data = distribute_tensor(torch.randn(4, 2), mesh, [Shard(0)])
    assert form_of(whole).data_ptr() == whole.to_local().data_ptr()
    plain = torch.randn(2)
    assert form_of(plain) is plain is whole_of(plain)


def test_a_distributed_tensor_that_is_held_elsewhere(mesh: DeviceMesh) -> None:
    """Its gradient would be lost; where it has none, it is a constant."""
    held = [distribute_tensor(torch.randn(8, 8), mesh, [Replicate()])]

    class Using(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (DTensor.from_local(super().forward(x), mesh, [Replicate()]) @ held[0].t()).to_local()

    assert capture(Using(8, 8), (torch.randn(4, 8),)).program.gradients
    held[0].requires_grad_()
    with pytest.raises(CaptureError, match="its gradient would be lost"):
        capture(Using(8, 8), (torch.randn(4, 8),))


def test_a_distributed_result_is_formed_again(mesh: DeviceMesh) -> None:
    model = nn.Linear(8, 16)
    parallelize_module(model, mesh, ColwiseParallel(use_local_output=False))
    x = torch.randn(4, 8)
    captured = capture(model, *hooked(model, (x,), {}))
    (spec,) = captured.contract.specs
    assert spec.placements == (Shard(-1 % 2),)
    result, _ = captured.contract.fulfil(model, [torch.randn(4, 8)], ())
    assert isinstance(result, DTensor)
    assert result.shape == (4, 16)


@pytest.mark.parametrize("ask", ["plan", "rematerialize", "fits"])
def test_arguments_that_the_model_itself_distributes(mesh: DeviceMesh, ask: str) -> None:
    """Hooks on a model of distributed modules make its arguments, so those of a sample, too."""
    model = distribute_module(
        nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)),
        mesh,
        input_fn=lambda _, inputs, mesh: tuple(distribute_tensor(one, mesh, [Shard(0)]) for one in inputs),
        output_fn=lambda _, output, __: output.to_local(),
    )
    x = torch.randn(4, 8)
    if ask == "fits":
        assert lowtide.fits(model, (x,), device="1GiB").input_bytes == x.nbytes / 2
    elif ask == "plan":
        assert lowtide.plan(model, (x,), budget="100%").graph.ops
    else:
        lowtide.rematerialize(model, (x,), budget="100%", on_capture_error="error", on_new_signature="error")
        model(x).sum().backward()
        assert isinstance(model[0].weight.grad, DTensor)
