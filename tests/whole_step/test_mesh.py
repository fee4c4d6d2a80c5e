"""A mesh on paper: what one rank of a cluster that is not there takes."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import lowtide
from lowtide.cost.links import get_link
from lowtide.ir import Compute, Phase, check, simulate
from lowtide.ir.graph import GATHER_TARGET
from lowtide.whole_step.mesh import blocks_of, link_of, parse_links, parse_mesh, pretended, spread
from lowtide.whole_step.ranked import checkpointed
from tests.integrations.launch import torchrun
from tests.support.versions import needs_known_fsdp2

pytestmark = needs_known_fsdp2

_SIZES = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "use_cache": False,
}  # fmt: skip


def llama(device: str = "meta") -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device(device):
        rows = torch.zeros(2, 64, dtype=torch.long)
        return LlamaForCausalLM(LlamaConfig(**_SIZES)), {"input_ids": rows, "labels": rows}


@functools.cache
def fitted(mesh: str, **options: Any) -> lowtide.Fit:
    model, kwargs = llama()
    return lowtide.fits(model, (), kwargs, mesh=mesh, **{"device": "H100-80GB", "planner": "auto{effort=0}", **options})


def test_a_rank_holds_its_part() -> None:
    """Half of the parameters, gradients and state over two ranks, about a quarter over four by both ways."""
    alone, sharded, both = fitted("dp=1"), fitted("dp=2"), fitted("dp=2,tp=2")
    for name in ("parameter_bytes", "gradient_bytes", "optimizer_bytes"):
        whole, half, quarter = (getattr(each, name) for each in (alone, sharded, both))
        assert half == pytest.approx(whole / 2, rel=0.01)
        assert whole / 4 <= quarter < 0.27 * whole
    assert both.pass_bytes < sharded.pass_bytes
    assert sharded
    assert sharded.plan is not None
    assert sharded.mesh == "dp=2"
    assert "spread over dp=2" in str(sharded)


def test_passes_beside_each_other() -> None:
    """Checkpointing gathers the blocks twice; a plan hides what a pass without one waits for."""
    fit = fitted("dp=8")
    passes = dict(fit.passes)
    plain, every, planned = passes.values()
    layers = _SIZES["num_hidden_layers"]
    assert every.collectives == plain.collectives + layers
    assert every.peak_bytes < plain.peak_bytes
    assert every.computing_ns > plain.computing_ns
    assert planned.time_ns <= plain.time_ns
    assert planned.exposed_ns < plain.exposed_ns == plain.collective_ns
    assert fit.to_json()["passes"]["with the plan"]["exposed_ns"] == planned.exposed_ns


def test_every_block_checkpointed() -> None:
    """The schedule is a valid one, and runs each operator of a block's forward pass that its backward pass needs again."""
    model, kwargs = llama()
    with pretended({"dp": 2}) as mesh:
        model = spread(model, mesh)
        plan = lowtide.plan(model, (), kwargs, budget="100%", planner="keep-all")
    schedule = checkpointed(plan.graph, plan.costs, [f"model.layers.{i}" for i in range(2)])
    check(plan.graph, schedule)
    runs = [step.op for step in schedule.steps[schedule.boundary :] if isinstance(step, Compute)]
    again = [plan.graph.ops[op] for op in runs if plan.graph.ops[op].phase is Phase.FORWARD]
    assert {op.module.split(".")[2] for op in again} == {"0", "1"}
    assert sum(op.target == GATHER_TARGET for op in again) == 2
    assert simulate(plan.graph, plan.costs, schedule).peak_bytes < plan.peak_bytes


def test_slower_links_take_longer() -> None:
    times = [dict(fitted("dp=8", link=link).passes)["without a plan"] for link in ("nvlink", "infiniband-ndr")]
    assert times[0].collective_ns < times[1].collective_ns
    assert times[0].computing_ns == times[1].computing_ns


def test_replicas_of_shards() -> None:
    """A rank holds as much as one of the shards, and sums what was reduced once more among the replicas."""
    sharded, replicated = fitted("dp=2"), fitted("replicate=4,dp=2")
    assert replicated.parameter_bytes == sharded.parameter_bytes
    assert replicated.pass_bytes == sharded.pass_bytes
    one, two = (dict(each.passes)["without a plan"] for each in (sharded, replicated))
    assert two.computing_ns == one.computing_ns
    assert two.collective_ns > one.collective_ns
    slow = dict(fitted("replicate=4,dp=2", link="replicate=ethernet-25").passes)["without a plan"]
    assert slow.collective_ns > two.collective_ns


def test_links_by_dimension() -> None:
    with pretended({"dp": 4, "tp": 2}) as mesh:
        links = parse_links("tp=nvlink,dp=infiniband", {"dp": 4, "tp": 2}, "h100")
        assert links == {"dp": get_link("infiniband-ndr"), "tp": get_link("nvlink4")}
        between = link_of(mesh, links)
        assert between((0, 1)) is links["tp"]
        assert between((0, 2, 4, 6)) is links["dp"]
        assert between(tuple(range(8))) is links["dp"], "the slower one, of a group that spans both"


def test_a_function_that_spreads_its_model_itself() -> None:
    """It is left as it is, and sharded by the units that it has."""
    with pretended(parse_mesh("dp=2")) as mesh:
        model, kwargs = llama()
        fully_shard(model, mesh=mesh["dp"])
        fit = lowtide.fits(model, (), kwargs, mesh="dp=2", device="64GiB", planner="keep-all")
    assert dict(fit.passes)["without a plan"].collectives == 2, "one unit: one gather, one reduction"


def test_a_model_asked_about_twice() -> None:
    """It stays whole, whatever the mesh; an optimizer of its parameters counts for the part of a rank, as its class does."""
    model, kwargs = llama()
    whole, optimizer = dict(model.named_parameters()), torch.optim.AdamW(model.parameters())
    for mesh in ("dp=2,tp=2", "dp=4", "dp=2,tp=2"):
        options: dict[str, Any] = {"mesh": mesh, "device": "H100-80GB", "planner": "auto{effort=0}"}
        one, other = (lowtide.fits(model, (), kwargs, optimizer=each, **options) for each in (optimizer, "AdamW"))
        assert one.to_json() == other.to_json()
        assert one.model == "LlamaForCausalLM"
        assert dict(model.named_parameters()) == whole
        assert optimizer.param_groups[0]["params"] == [*whole.values()]
    assert not optimizer.state


def test_blocks() -> None:
    inner = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model = nn.ModuleList([nn.ModuleList([inner]), nn.ModuleList([nn.Tanh()])])
    assert blocks_of(model) == list(model), "the outermost list of several of a class"
    assert blocks_of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == []


@pytest.mark.parametrize(
    ("mesh", "options", "words"),
    [
        ("dp", {}, "is not understood"),
        ("cp=2", {}, "is not understood"),
        ("dp=2,dp=2", {}, "is not understood"),
        ("dp=0", {}, "is not understood"),
        ("dp=2000000", {}, "are the most"),
        ("replicate=2", {}, "give dp= too"),
        ("dp=2", {"link": "string"}, "known are"),
        ("dp=2", {"link": "tp=nvlink"}, "the mesh has dp"),
        ("dp=2", {"link": 3}, "link 3 is not understood"),
        ("pp=2", {"stage": "0", "micro_batches": 2}, "stage '0' is none of pp=2"),
        ("pp=2", {"stage": 0, "micro_batches": "2"}, "1 micro-batch or more, not '2'"),
    ],
)
def test_what_makes_no_sense(mesh: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(lowtide.PlanError, match=words):
        fitted(mesh, **options)
    assert not torch.distributed.is_initialized()


def test_a_model_that_does_not_say_how_it_is_parallel() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    with pytest.raises(lowtide.PlanError, match="tp_plan"):
        lowtide.fits(model, (torch.zeros(2, 8),), mesh="tp=2", device="1GiB")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_as_real_processes_measure(ranks: int) -> None:
    """The pass without a plan, predicted on paper and measured in each of the processes."""
    said = torchrun("tests.integrations.fsdp_program", "as_on_paper", processes=ranks)
    (paper,) = set(re.findall(r"on paper (\d+)", said))
    measured = [int(size) for size in re.findall(r"measured (\d+)", said)]
    assert len(measured) == ranks
    assert all(size == pytest.approx(int(paper), rel=0.01) for size in measured), said
