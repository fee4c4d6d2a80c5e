"""Whether a training step fits a device: its parts against what a real step takes, and what is said of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.capture import capture
from lowtide.cli.main import main
from lowtide.program.optimizer_state import optimizer_state_bytes
from lowtide.whole_step.inside import updated_inside

Make = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "AdamW": torch.optim.AdamW,
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "RMSprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.9),
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "ASGD": torch.optim.ASGD,
    "Rprop": torch.optim.Rprop,
    "Adafactor": torch.optim.Adafactor,
}


def _model(device: str = "cpu") -> nn.Module:
    with torch.device(device):
        body = [module for _ in range(4) for module in (nn.Linear(64, 64), nn.GELU())]
        return nn.Sequential(nn.BatchNorm1d(64), *body, nn.Linear(64, 8))


def _kept(optimizer: torch.optim.Optimizer) -> int:
    found = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    return sum(tensor.untyped_storage().nbytes() for tensor in found)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_is_that_of_a_real_step(name: str) -> None:
    model = _model()
    model[1].weight.requires_grad_(False)  # type: ignore[union-attr, operator]
    model(torch.randn(4, 64)).sum().backward()
    optimizer = OPTIMIZERS[name](model.parameters())
    before, kept = [parameter.clone() for parameter in model.parameters()], _kept(optimizer)
    _, found = optimizer_state_bytes(optimizer, model)
    assert _kept(optimizer) == kept
    assert all(map(torch.equal, before, model.parameters()))
    assert optimizer_state_bytes(OPTIMIZERS[name], model)[1] == found
    optimizer.step()
    assert found == _kept(optimizer)
    assert optimizer_state_bytes(optimizer, model)[1] == found


def test_groups_with_options_of_their_own() -> None:
    model = _model()
    first, *others = model.parameters()
    optimizer = torch.optim.SGD([{"params": [first], "momentum": 0.9}, {"params": others}], 0.1)
    assert optimizer_state_bytes(optimizer, model)[1] == first.untyped_storage().nbytes()


def test_the_state_of_an_optimizer_whose_step_is_wrapped() -> None:
    """By a scheduler: it steps the optimizer itself. Hooks see no steps but its own."""
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.optim.lr_scheduler.StepLR(optimizer, 10)
    model(torch.ones(2, 8)).sum().backward()
    before, seen = model.weight.detach().clone(), list[object]()
    optimizer.register_step_post_hook(lambda *_: seen.append(_))
    assert optimizer_state_bytes(optimizer, model)[1] == 4 * (8 * 4 + 4)
    assert torch.equal(model.weight, before)
    assert not seen
    assert not optimizer.state


def test_parameters_that_the_optimizer_does_not_have_keep_their_gradients() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    some = torch.optim.AdamW([*model.parameters()][:2])
    program, moved = updated_inside(capture(model, (torch.ones(2, 64),)).program, model, some, moving=True)
    assert program.updated == (0, 1)
    assert moved == 2 * 64 * 64 * 4  # the bias is too small
    assert [position for position, _ in program.gradients] == [5, 4, 3, 2]  # as they are complete


class _OfAllGradients(torch.optim.SGD):
    """Its step is its own, and may need all gradients."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, 0.1)

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_updates_inside_of_the_pass_and_states_on_the_host_where_it_does_not_fit_otherwise() -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(6))), torch.empty(64, 1024)
    whole = sum(parameter.nbytes for parameter in model.parameters())  # 24 MiB
    options: dict[str, Any] = {"optimizer": "AdamW", "reserve": 0, "planner": "auto{effort=0}"}

    def asked(times: float, **more: Any) -> lowtide.Fit:
        name = "H100-1GB"
        return lowtide.fits(model, (x,), device=name, **options | {"reserve": 10**9 - int(times * whole)} | more)

    after, inside = asked(4.5), asked(3.6)
    assert after and not after.inside
    assert inside and inside.inside and not inside.moved_bytes
    assert "inside of the backward pass" in str(inside)
    assert "optimizer=optimizer)" in inside.advice[0]
    assert not asked(2.5)
    away = asked(2.5, offload="cpu")
    assert away and away.inside and away.plan is not None
    assert away.moved_bytes == 6 * 2 * (1024 + 1) * 1024 * 4
    assert away.resident_bytes + away.plan.peak_bytes <= 2.5 * whole
    assert away.without_bytes == after.without_bytes
    assert "in the host's memory between updates" in str(away)
    assert 'offload="cpu")' in away.advice[0]
    least = asked(1.05, offload="cpu")
    assert not least and least.missing_bytes > 0
    assert not asked(1.05, optimizer=_OfAllGradients).inside


def test_the_parts_are_those_of_a_real_step() -> None:
    model, x = _model(), torch.randn(256, 64)
    fit = lowtide.fits(model, (x,), device="1GiB", optimizer="adamw")
    assert fit and fit.fits_without and fit.overhead == 0
    assert fit.parameter_bytes == sum(p.numel() * 4 for p in model.parameters()) == fit.gradient_bytes
    assert fit.buffer_bytes == 64 * 4 * 2 + 8
    assert fit.input_bytes == x.numel() * 4
    assert fit.samples == 256 and fit.reserve_bytes == 0
    assert fit.room_bytes == (1 << 30) - fit.resident_bytes
    whole = lowtide.plan(model, (x,), budget="100%").peak_bytes
    assert fit.pass_bytes == pytest.approx(whole, rel=0.05)  # scratch is modelled
    assert all(size == 256 * 64 * 4 for _, size in fit.largest)


def test_a_model_without_memory_has_the_same_answer() -> None:
    there, nowhere = (
        lowtide.fits(_model(d), (torch.zeros(256, 64, device=d),), device="1MiB") for d in ("cpu", "meta")
    )
    assert there.to_json() == nowhere.to_json()


def test_between_all_and_nothing() -> None:
    """From some capacity down to some other it fits with a plan, whose peak is within the room; below, it says what is
    missing."""
    model, args = _model(), (torch.randn(512, 64),)
    whole = lowtide.fits(model, args, device="1GiB", optimizer="sgd")
    tight = lowtide.fits(model, args, device=whole.without_bytes - 1, optimizer="sgd")
    assert tight and not tight.fits_without
    assert tight.plan is not None and tight.plan.peak_bytes <= tight.room_bytes == whole.pass_bytes - 1
    assert f"budget={tight.plan.budget_bytes}" in tight.advice[0]
    none = lowtide.fits(model, args, device=whole.without_bytes // 4, optimizer="adamw")
    assert not none and none.plan is None
    assert none.missing_bytes == none.least_bytes - none.room_bytes > 0
    enough = lowtide.fits(model, args, device=none.capacity_bytes + none.missing_bytes, optimizer="adamw")
    assert enough and enough.missing_bytes == 0
    assert "does not fit" in str(none)


def test_an_advised_batch_and_optimizer() -> None:
    model = _model()
    device = "600KB"
    least = lowtide.fits(model, (torch.randn(512, 64),), device=device, optimizer="adamw")
    assert not least
    advised = next(text for text in least.advice if "samples" in text)
    batch = int(advised.split()[1])
    assert 0 < batch < 512
    assert lowtide.fits(model, (torch.randn(int(0.9 * batch), 64),), device=device, optimizer="adamw")
    short = lowtide.fits(
        model, (torch.randn(512, 64),), device=least.capacity_bytes + least.missing_bytes - 1000, optimizer="adamw"
    )
    assert any("SGD without momentum" in text for text in short.advice)


def test_named_devices() -> None:
    model, args = _model(), (torch.randn(32, 64),)
    quick = lowtide.fits(model, args, device="H100-80GB")
    slow = lowtide.fits(model, args, device="a100 40gb", reserve="2GB")
    assert (quick.capacity_bytes, quick.reserve_bytes) == (80 * 10**9, 10**9)
    assert (slow.capacity_bytes, slow.reserve_bytes) == (40 * 10**9, 2 * 10**9)
    assert quick.plan is not None and slow.plan is not None
    assert quick.plan.costs.device == "analytical h100"
    assert quick.plan.time_ns <= slow.plan.time_ns


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"device": "L4-24GB"}, r'not in the table, which has .*a100-..GB.*; give its memory alone, such as "24GB"'),
        ({"device": "A100"}, "'A100' is not a device memory.* by its name has the gigabytes beside it: a100-..GB"),
        ({"device": 0}, "not positive"),
        ({"device": "1GiB", "optimizer": "Sophia"}, "torch.optim has no optimizer 'Sophia'; it has .*adamw"),
        ({"device": "1GiB", "optimizer": 3}, "optimizer is a int; give an optimizer, a class"),
        ({"device": "1GiB", "optimizer": torch.optim.LBFGS}, "the state of LBFGS could not be found out"),
        ({"device": "1GiB", "reserve": "-1"}, "reserve of '-1'"),
        ({"device": 0.5}, r"not positive; give bytes as an int, or a string with a unit [^%]*$"),
        ({"device": "1GiB", "mesh": {"dp": 8}}, r"mesh {'dp': 8} is not understood: give sizes by dimension"),
        (
            {"device": "1GiB", "offload": "cpu"},
            r"offload='cpu' needs a device whose link to the host is known: .* a100-..GB",
        ),
        ({"device": "A100-80GB", "offload": "disk"}, r"offload='disk' is not modelled; only offload=\"cpu\""),
        ({"device": "1GiB", "kwargs": torch.ones(2)}, "kwargs is a Tensor, not a dictionary"),
    ],
)
def test_what_makes_no_sense(options: dict[str, Any], why: str) -> None:
    with pytest.raises(lowtide.PlanError, match=why):
        lowtide.fits(_model(), (torch.randn(4, 64),), **options)


def test_as_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "fitted.py").write_text(
        "import torch\n"
        "def build():\n"
        "    with torch.device('meta'):\n"
        "        return torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8))), (torch.randn(512, 64),)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert main(["fits", "fitted:build", "--device", "1GiB", "--optimizer", "sgd"]) == 0
    assert "Sequential fits on 1GiB: " in capsys.readouterr().out
    assert main(["fits", "fitted:build", "--device", "200kB", "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is False and found["missing_bytes"] > 0 and found["overhead"] is None
    assert found["parameter_bytes"] == 8 * 65 * 64 * 4


def test_in_a_notebook() -> None:
    html = lowtide.fits(_model(), (torch.randn(32, 64),), device="1GiB")._repr_html_()
    assert "Sequential fits on 1GiB" in html and "advice 1" in html


class Attending(nn.Module):
    def __init__(self, mask: bool = False) -> None:
        super().__init__()
        self.project = nn.Linear(64, 192)
        self.mask = mask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.project(x).view(2, 128, 3, 4, 16).permute(2, 0, 3, 1, 4).unbind(0)
        mask = torch.ones(128, 128, dtype=torch.bool, device=x.device).tril() if self.mask else None
        attended = nn.functional.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None)
        return attended.float().square().mean()


@pytest.mark.parametrize(
    ("dtype", "mask", "kernel"),
    [
        (torch.bfloat16, False, "_scaled_dot_product_flash_attention"),
        (torch.bfloat16, True, "_scaled_dot_product_efficient_attention"),
        (torch.float32, False, "_scaled_dot_product_efficient_attention"),
        (torch.float64, False, "_safe_softmax"),
    ],
)
def test_attention_without_memory_is_what_a_gpu_computes(dtype: torch.dtype, mask: bool, kernel: str) -> None:
    """No scores of all pairs where it has a fused kernel."""
    with torch.device("meta"):
        model, x = Attending(mask).to(dtype), torch.empty(2, 128, 64, dtype=dtype)
    fit = lowtide.fits(model, (x,), device="A100-80GB")
    assert fit.plan is not None
    targets = {op.target for op in fit.plan.graph.ops}
    assert f"aten.{kernel}.default" in targets
    assert (f"aten.{kernel}_backward.default" in targets) == ("attention" in kernel)
    pairs = 2 * 4 * 128 * 128 * dtype.itemsize
    assert (int(fit.plan.costs.storage_bytes.max()) >= pairs) == ("softmax" in kernel)
    usual = lowtide.fits(model, (x,), device="24GiB")
    assert usual.plan is not None
    assert any("softmax" in op.target for op in usual.plan.graph.ops)
