"""The largest batch: the answer trains within the budget, the next one does not, and the model stays as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import lowtide
from lowtide import max_batch
from lowtide.batches.samples import MakeSample, Samples
from lowtide.cli.main import main

KIB = 1 << 10
WIDTH, LENGTH, VOCABULARY = 32, 16, 50
PLANNER = "linearized-sqrt"  # what it finds depends on bytes alone, not on measured times


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path_factory.mktemp("costs")))
        yield


class Tokens(nn.Module):
    """An embedding, feed-forward blocks with dropout and normalisation, and a loss over the positions of a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        block = (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1))
        self.blocks = nn.Sequential(*(nn.Sequential(*copy.deepcopy(block)) for _ in range(6)))
        self.normalise = nn.BatchNorm1d(LENGTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        hidden = self.normalise(self.blocks(self.embedding(ids))) * scale
        if not mask.all():
            hidden = hidden * mask[..., None]
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), ids.flatten())


def _model() -> Tokens:
    torch.manual_seed(0)
    return Tokens().train()


def _sample(batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    ids = torch.randint(0, VOCABULARY, (batch, LENGTH))
    return (ids,), {"mask": torch.ones_like(ids), "scale": torch.rand(batch, LENGTH, WIDTH)}


def _fits(batch: int, budget: int, **options: Any) -> bool:
    """What ``rematerialize`` itself says of a batch."""
    args, kwargs = _sample(batch)
    try:
        lowtide.rematerialize(_model(), args, kwargs, planner=PLANNER, **options, budget=budget)
    except lowtide.InfeasibleBudgetError:
        return False
    return True


def test_the_answer_is_the_largest() -> None:
    budget = 700 * KIB
    found = max_batch(_sample, _model(), budget=budget, max_overhead=None, planner=PLANNER)
    assert found.batch > found.batch_without > 0
    assert found.predicted_peak_bytes <= budget
    assert found.measured_peak_bytes == found.predicted_peak_bytes
    assert _fits(found.batch, budget) and not _fits(found.batch + 1, budget)
    args, kwargs = _sample(found.batch_without)
    assert lowtide.plan(_model(), args, kwargs, budget=budget, planner="keep-all").peak_bytes <= budget
    args, kwargs = _sample(found.batch_without + 1)
    with pytest.raises(lowtide.InfeasibleBudgetError):
        lowtide.plan(_model(), args, kwargs, budget=budget, planner="keep-all")
    assert str(found.batch) in str(found) and found.gain > 1 and not found.limited


def test_less_overhead_is_a_smaller_batch() -> None:
    batches = [
        max_batch(_sample, _model(), budget=700 * KIB, max_overhead=most, planner=PLANNER) for most in (0.0, 0.1, None)
    ]
    assert batches[0].batch == batches[0].batch_without
    assert batches[0].batch <= batches[1].batch <= batches[2].batch
    assert batches[1].overhead <= 0.1


def test_what_moves_makes_room_for_more(tmp_path: Path) -> None:
    budget = 700 * KIB
    asked: dict[str, Any] = {"budget": budget, "max_overhead": None, "planner": "offload{effort=0}"}
    found = max_batch(_sample, _model(), **asked, offload=f"disk:{tmp_path}")
    assert found.batch > found.batch_without
    assert found.plan.schedule.moves
    assert found.measured_peak_bytes == found.predicted_peak_bytes <= budget
    little = max_batch(_sample, _model(), **asked, offload=f"disk:{tmp_path}", offload_budget=64 * KIB)
    assert found.batch_without <= little.batch < found.batch
    with pytest.raises(lowtide.PlanError, match="needs offload="):
        max_batch(_sample, _model(), budget=budget, offload_budget=KIB)


def test_a_total_budget_counts_parameters_states_and_inputs() -> None:
    model = _model()
    found = max_batch(_sample, model, total_budget=900 * KIB, max_overhead=None, planner=PLANNER)
    args, kwargs = _sample(found.batch)
    planned = lowtide.rematerialize(_model(), args, kwargs, total_budget=900 * KIB, planner=PLANNER)
    (plan,) = lowtide.plans(planned)
    assert plan.budget_bytes == found.plan.budget_bytes
    states = 2 * sum(p.numel() * p.element_size() for p in model.parameters())
    assert found.plan.budget_bytes < 900 * KIB - states
    assert found.total and "in all" in str(found)


def test_the_model_is_left_alone() -> None:
    model = _model()
    called: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.grad = torch.ones_like(parameter)
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: called.append(name))
    before = copy.deepcopy(model.state_dict())
    generator = torch.get_rng_state()
    max_batch(_sample, model, budget=400 * KIB, planner=PLANNER)
    assert torch.equal(torch.get_rng_state(), generator)
    assert not called and "forward" not in model.__dict__
    assert all(p.grad is not None and bool((p.grad == 1).all()) for p in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_the_limit_ends_the_search() -> None:
    found = max_batch(_sample, _model(), budget="1GiB", planner=PLANNER, limit=5)
    assert (found.batch, found.batch_without, found.limited) == (5, 5, True)
    assert "most that was tried" in str(found)


class ByParity(nn.Module):
    """Another program for odd batches."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).sum() if x.shape[0] < 4 else self.blocks(x).square().sum()


def test_programs_that_differ_between_batches() -> None:
    def sample(batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (torch.randn(batch, 32, 64),), {}

    budget = 300 * KIB
    found = max_batch(sample, ByParity(), budget=budget, max_overhead=None, planner=PLANNER)
    assert found.measured_peak_bytes is not None and found.measured_peak_bytes <= budget
    with pytest.raises(lowtide.InfeasibleBudgetError):
        lowtide.plan(ByParity(), *sample(found.batch + 1), budget=budget, planner=PLANNER)


def test_not_even_one_sample() -> None:
    with pytest.raises(lowtide.InfeasibleBudgetError, match="not even a batch of 1") as caught:
        max_batch(_sample, _model(), budget=2 * KIB, planner=PLANNER)
    assert caught.value.minimum_bytes > 2 * KIB


def _raising(batch: int) -> Any:
    raise OSError("no data")


@pytest.mark.parametrize(
    ("make_sample", "options", "reason"),
    [
        (_sample, {}, "either budget= .* or total_budget="),
        (_sample, {"budget": "40%"}, "would grow with the batch"),
        (_sample, {"budget": 0.4}, r"is not positive; give bytes as an int, or a string with a unit[^%]*$"),
        (_sample, {"budget": "1MiB", "max_overhead": -0.1}, "a fraction"),
        (_sample, {"budget": "1MiB", "max_overhead": "33%"}, "a fraction"),
        (_sample, {"budget": "1MiB", "limit": 0}, "at least one sample"),
        (_sample, {"budget": "1MiB", "planner": "fastest"}, "known: auto"),
        (_raising, {"budget": "1MiB"}, r"make_sample\(2\) raised OSError: no data"),
        (lambda batch: torch.ones(batch), {"budget": "1MiB"}, r"returned a Tensor, not the pair \(args, kwargs\)"),
        (lambda batch: (torch.ones(batch), {}), {"budget": "1MiB"}, "they are a tuple"),
    ],
)
def test_errors(make_sample: MakeSample, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(lowtide.PlanError, match=reason):
        max_batch(make_sample, _model(), **options)


def test_arguments_in_the_wrong_order() -> None:
    with pytest.raises(
        lowtide.PlanError, match=r"max_batch\(make_sample, model\) takes a torch.nn.Module, not a function"
    ):
        max_batch(_model(), _sample, budget="1MiB")


def test_samples_take_no_memory() -> None:
    calls: list[type] = []

    def make_sample(batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        pictures = torch.randn(batch, 3, 1000, 1000)
        calls.append(type(pictures))
        labels = torch.arange(batch) % 2
        return (pictures,), {"labels": labels, "again": labels}

    samples = Samples(make_sample, 2)
    measured = lowtide.measure(lambda: samples.fake(10_000))
    args, kwargs = samples.fake(10_000)
    assert calls[1:] == [FakeTensor, FakeTensor]
    assert args[0].shape == (10_000, 3, 1000, 1000)
    assert kwargs["labels"] is kwargs["again"]
    assert kwargs["labels"][:4].tolist() == [0, 1, 0, 1] and len(kwargs["labels"]) == 10_000
    assert measured.final_bytes == 10_000 * 8


@pytest.mark.parametrize(
    "fails_on_fakes",
    [
        lambda batch: ((torch.randn(batch, 4),), {"count": int(torch.ones(batch).sum().item())}),
        lambda batch: ((torch.randn(batch, 4), torch.arange(batch)[torch.rand(batch) < 2]), {}),
    ],
)
def test_functions_that_need_values_run_for_real(fails_on_fakes: Callable[[int], Any]) -> None:
    args, kwargs = Samples(fails_on_fakes, 2).fake(6)
    assert isinstance(args[0], FakeTensor) and args[0].shape == (6, 4)
    assert kwargs.get("count", 6) == 6 and all(len(tensor) == 6 for tensor in args)


_MODULE = """
import torch
from tests.batches.test_max_batch import _model, _sample

def build():
    return _model(), _sample

def wrong():
    return _model()
"""


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "max_batch_sample.py").write_text(_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    arguments = ["--budget", "500KiB", "--planner", PLANNER, "--max-overhead", "20"]
    assert main(["max-batch", "max_batch_sample:build", *arguments]) == 0
    assert "largest batch" in capsys.readouterr().out
    assert main(["max-batch", "max_batch_sample:wrong", *arguments]) == 2
    assert "(model, make_sample)" in capsys.readouterr().err
    assert main(["max-batch", "max_batch_sample:build", "--budget", "1KiB", "--planner", PLANNER]) == 3
