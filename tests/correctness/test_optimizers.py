"""Updates inside of backward passes: equal to the bit to a step after them, exact peaks, and nothing wrong in silence."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

import lowtide
from lowtide.ir.graph import OPTIMIZER_TARGET
from tests.support.networks import WithLoss
from tests.support.training import QUICK

WIDTH = 32
Make = Callable[[nn.Module], optim.Optimizer]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks below a loss; ``frozen`` has no gradient, ``spare`` is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head, self.spare = nn.Linear(WIDTH, 5), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.frozen(x)).square().mean()


class Tied(nn.Module):
    """A weight that an embedding, a projection and a matrix product without a gradient read."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.body = nn.Embedding(20, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.embedding(x) @ self.body.weight.detach())
        h = torch.relu(self.body(self.norm(h))) * torch.sigmoid(F.linear(h, self.body.weight.t()))
        return F.cross_entropy(self.head(h).flatten(0, 1), x.flatten())


def _batch(seed: int) -> torch.Tensor:
    return torch.randn(48, WIDTH, generator=torch.Generator().manual_seed(seed))


def _tokens(seed: int) -> torch.Tensor:
    return torch.randint(20, (8, 12), generator=torch.Generator().manual_seed(seed))


def _pair(
    make: Make, kind: type[nn.Module] = Net, batch: Callable[[int], torch.Tensor] = _batch, budget: str = "75%"
) -> tuple[tuple[nn.Module, optim.Optimizer], tuple[nn.Module, optim.Optimizer]]:
    """A model with its optimizer, and the same planned."""
    torch.manual_seed(0)
    plain = kind()
    planned = copy.deepcopy(plain)
    ours = make(planned)
    lowtide.rematerialize(planned, (batch(0),), budget=budget, planner="greedy", optimizer=ours)
    return (plain, make(plain)), (planned, ours)


def _step(model: nn.Module, optimizer: optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _assert_same(one: tuple[nn.Module, optim.Optimizer], two: tuple[nn.Module, optim.Optimizer]) -> None:
    """Parameters, and all of the optimizers' state, with its order."""
    for ours, theirs in zip(one[0].parameters(), two[0].parameters(), strict=True):
        assert torch.equal(ours, theirs)
    first, second = one[1].state_dict(), two[1].state_dict()
    assert str(first["param_groups"]) == str(second["param_groups"])
    assert list(first["state"]) == list(second["state"])
    for key, state in first["state"].items():
        assert list(state) == list(second["state"][key])
        for name, value in state.items():
            other = second["state"][key][name]
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, other)
                assert (value.dtype, value.stride()) == (other.dtype, other.stride())
            else:
                assert str(value) == str(other)


def _updates(model: nn.Module) -> int:
    """How many parameters the latest plan updates."""
    return sum(op.target == OPTIMIZER_TARGET for op in lowtide.plans(model)[-1].graph.ops)


def _sgd(model: nn.Module) -> optim.Optimizer:
    return optim.SGD(model.parameters(), 0.1, momentum=0.9)


OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda m: optim.SGD(m.parameters(), 0.1),
    "sgd, nesterov": lambda m: optim.SGD(m.parameters(), 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd, fused": lambda m: optim.SGD(m.parameters(), 0.1, momentum=0.9, fused=True),
    "sgd, dampening, maximize": lambda m: optim.SGD(m.parameters(), 1e-3, momentum=0.9, dampening=0.1, maximize=True),
    "adam": lambda m: optim.Adam(m.parameters(), 0.01, foreach=True),
    "adam, amsgrad, tensor": lambda m: optim.Adam(m.parameters(), torch.tensor(0.01), amsgrad=True, weight_decay=0.1),
    "adamw": lambda m: optim.AdamW(m.parameters(), 0.01),
    "adamw, fused": lambda m: optim.AdamW(m.parameters(), 0.01, fused=True),
    "nadam": lambda m: optim.NAdam(m.parameters(), 0.01),
    "radam": lambda m: optim.RAdam(m.parameters(), 0.01, foreach=False),
    "adamax": lambda m: optim.Adamax(m.parameters(), 0.01),
    "adagrad": lambda m: optim.Adagrad(m.parameters(), 0.01, initial_accumulator_value=0.1),
    "adadelta": lambda m: optim.Adadelta(m.parameters(), 0.5),
    "rmsprop": lambda m: optim.RMSprop(m.parameters(), 0.01, centered=True, momentum=0.5),
    "rprop": lambda m: optim.Rprop(m.parameters(), 0.01),
    "asgd": lambda m: optim.ASGD(m.parameters(), 0.01),
    "adafactor": lambda m: optim.Adafactor(m.parameters(), 0.01),
    "muon": lambda m: optim.Muon([p for p in m.parameters() if p.dim() == 2], 0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_is_equal_to_a_step_after_the_backward_pass(name: str) -> None:
    plain, planned = _pair(OPTIMIZERS[name])
    trained = sum(p.requires_grad for p in planned[0].parameters()) - 2  # but the spare ones
    assert _updates(planned[0]) == (7 if name == "muon" else trained)
    for seed in range(7):
        assert torch.equal(_step(*plain, _batch(seed)), _step(*planned, _batch(seed)))
    _assert_same(plain, planned)
    x = _batch(9)
    planned[0].zero_grad()  # Muon takes matrices alone
    measured = lowtide.measure(lambda: planned[0](x).backward())
    assert measured.peak_bytes == lowtide.plans(planned[0])[0].peak_bytes


@pytest.mark.parametrize(
    ("planner", "budget"), [("auto", "80%"), ("dtr", "85%"), ("greedy", "85%"), ("rockmate", "95%")]
)
def test_no_planner_reads_a_parameter_after_its_update(planner: str, budget: str) -> None:
    torch.manual_seed(0)
    plain = Tied()
    model = copy.deepcopy(plain)
    pair = (plain, _sgd(plain)), (model, _sgd(model))
    lowtide.rematerialize(model, (_tokens(0),), budget=budget, planner=planner, planning="wait", optimizer=pair[1][1])
    assert _updates(model) == 5
    for seed in range(3):
        assert torch.equal(_step(*pair[0], _tokens(seed)), _step(*pair[1], _tokens(seed)))
    _assert_same(*pair)


def test_gradients_leave_the_peak() -> None:
    torch.manual_seed(0)
    body = nn.Sequential(*(nn.Linear(128, 128) for _ in range(6)))  # ends in all gradients at once
    with_loss = [nn.Sequential(copy.deepcopy(body), nn.Softmax(-1)) for _ in range(2)]
    x = torch.randn(2, 128)
    for model, given in zip(with_loss, (None, optim.SGD(with_loss[1].parameters(), 0.1)), strict=True):
        lowtide.rematerialize(model, (x,), budget="100%", optimizer=given)
    without, inside = (lowtide.plans(model)[0].peak_bytes for model in with_loss)
    gradients = sum(p.nbytes for p in body.parameters())
    assert without > gradients
    assert without - inside > 0.6 * gradients


def test_groups_and_schedulers() -> None:
    def make(model: nn.Module) -> optim.Optimizer:
        decayed = [p for p in model.parameters() if p.dim() > 1]
        others = {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0, "lr": 0.2}
        return optim.AdamW([{"params": decayed}, others], 0.1, weight_decay=0.3)

    plain, planned = _pair(make)
    schedulers = [optim.lr_scheduler.OneCycleLR(one, 0.2, total_steps=8) for _, one in (plain, planned)]
    for seed in range(6):
        for pair, scheduler in zip((plain, planned), schedulers, strict=True):
            _step(*pair, _batch(seed))
            scheduler.step()
    _assert_same(plain, planned)


def test_state_is_saved_and_loaded_between_optimizers_of_both_kinds() -> None:
    plain, planned = _pair(OPTIMIZERS["adamw"])
    for seed in range(2):
        _step(*plain, _batch(seed))
        _step(*planned, _batch(seed))
    ours, theirs = planned[1].state_dict(), plain[1].state_dict()
    plain[1].load_state_dict(ours)
    planned[1].load_state_dict(copy.deepcopy(theirs))
    for seed in range(2, 4):
        _step(*plain, _batch(seed))
        _step(*planned, _batch(seed))
    _assert_same(plain, planned)


def test_groups_may_be_added_and_parameters_frozen() -> None:
    def make(model: nn.Module) -> optim.Optimizer:
        return optim.Adam(model.get_submodule("blocks").parameters(), 0.01)

    plain, planned = _pair(make)
    _step(*plain, _batch(0))
    _step(*planned, _batch(0))
    assert _updates(planned[0]) == 18
    for model, optimizer in (plain, planned):
        optimizer.add_param_group({"params": list(model.get_submodule("head").parameters()), "lr": 0.1})
        model.get_submodule("blocks.0").requires_grad_(False)
    for seed in range(3):
        _step(*plain, _batch(seed))
        _step(*planned, _batch(seed))
    assert _updates(planned[0]) == 14
    _assert_same(plain, planned)


def test_gradients_are_accumulated_where_that_is_said() -> None:
    plain, planned = _pair(OPTIMIZERS["adamw"])
    for seed in range(9):
        ends = seed % 3 == 2
        (plain[0](_batch(seed)) / 3).backward()
        with contextlib.nullcontext() if ends else lowtide.accumulating(planned[0]):
            (planned[0](_batch(seed)) / 3).backward()
        if ends:
            for _, optimizer in (plain, planned):
                optimizer.step()
                optimizer.zero_grad(set_to_none=seed > 3)
        else:
            for ours, theirs in zip(planned[0].parameters(), plain[0].parameters(), strict=True):
                assert (ours.grad is None) == (theirs.grad is None)
                assert ours.grad is None or torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]
    _assert_same(plain, planned)


def test_uneven_batches_are_accumulated() -> None:
    """What is known of sizes with updates in the backward pass says nothing of the costs without, and the other way round."""
    plain, planned = _pair(OPTIMIZERS["adamw"])
    for step, rows in enumerate(([8, 8], [8, 5, 3], [8], [7, 8, 1], [6, 4])):
        for model, optimizer in (plain, planned):
            for number, count in enumerate(rows):
                more = model is planned[0] and number + 1 < len(rows)
                with lowtide.accumulating(model) if more else contextlib.nullcontext():
                    model(_batch(10 * step + number)[:count]).backward()
            optimizer.step()
            optimizer.zero_grad()
    _assert_same(plain, planned)


def test_accelerate_tells_when_it_accumulates() -> None:
    accelerate = pytest.importorskip("accelerate")
    plain, planned = _pair(_sgd)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    try:
        model, optimizer = accelerator.prepare(planned[0], planned[1])
        for seed in range(6):
            (plain[0](_batch(seed)) / 2).backward()
            if seed % 2:
                plain[1].step()
                plain[1].zero_grad()
            with accelerator.accumulate(model):
                accelerator.backward(model(_batch(seed)))
                optimizer.step()
                optimizer.zero_grad()
        _assert_same(plain, planned)
    finally:
        accelerator.free_memory()
        accelerate.state.GradientState._reset_state()
        accelerate.state.AcceleratorState._reset_state(True)


def _step_with_closure(model: nn.Module, optimizer: optim.Optimizer, seed: int) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(_batch(seed))
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]


def test_a_closure_is_run_inside_the_step() -> None:
    plain, planned = _pair(OPTIMIZERS["adamw"])
    for seed in range(3):
        for model, optimizer in (plain, planned):
            _step_with_closure(model, optimizer, seed)
    _assert_same(plain, planned)


def _reads() -> Iterator[tuple[str, Callable[[nn.Module, optim.Optimizer], Any]]]:
    yield "clipping by norm", lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    yield "clipping by value", lambda model, _: nn.utils.clip_grad_value_(model.parameters(), 1.0)
    yield "a log", lambda model, _: [p.grad.norm() for p in model.parameters() if p.grad is not None]
    yield "a scaler", lambda _, optimizer: _scaled(optimizer)


def _scaled(optimizer: optim.Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)


@pytest.mark.parametrize(("what", "read"), list(_reads()), ids=lambda x: x if isinstance(x, str) else "")
def test_what_reads_gradients_is_told_that_they_are_gone(
    what: str, read: Callable[[nn.Module, optim.Optimizer], Any]
) -> None:
    _, (model, optimizer) = _pair(_sgd)
    model(_batch(0)).backward()
    with pytest.raises(
        lowtide.ExecutionError, match=r"updated the parameter with it in the backward pass.*accumulating"
    ):
        read(model, optimizer)
    optimizer.step()
    with pytest.raises(lowtide.ExecutionError, match="is gone"):  # after the step, too
        read(model, optimizer)


@pytest.mark.parametrize("make", [optim.AdamW, optim.SGD])
def test_a_step_of_another_optimizer_is_told_too(make: Callable[..., optim.Optimizer]) -> None:
    _, (model, optimizer) = _pair(_sgd)
    _step(model, optimizer, _batch(0))
    other = make(model.parameters(), lr=0.1)
    with pytest.raises(
        lowtide.ExecutionError, match=r"for the step of another optimizer .* call lowtide.restore\(model\)"
    ):
        _step(model, other, _batch(1))


def test_hooks_before_the_step_are_told_too() -> None:
    _, (model, optimizer) = _pair(_sgd)
    _step(model, optimizer, _batch(0))
    optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    with pytest.raises(lowtide.ExecutionError, match="is gone"):
        _step(model, optimizer, _batch(1))


def test_a_loop_of_another_kind_is_refused() -> None:
    _, (model, optimizer) = _pair(_sgd)
    model(_batch(0)).backward()
    with pytest.raises(lowtide.ExecutionError, match=r"another one comes before optimizer.step\(\)"):
        model(_batch(1)).backward()
    _, (model, optimizer) = _pair(_sgd)
    model(_batch(0)).backward()
    optimizer.step()
    with pytest.raises(lowtide.ExecutionError, match="not set to zero since"):
        model(_batch(1)).backward()
    _, (model, optimizer) = _pair(_sgd)
    model(_batch(0)).backward()
    with pytest.raises(lowtide.ExecutionError, match="those before the last inside"), lowtide.accumulating(model):
        model(_batch(1)).backward()
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(lowtide.ExecutionError, match="'lr' of parameter group 0 was changed between"):
        optimizer.step()


def test_gradients_may_be_set_to_zero_by_hand_or_in_place() -> None:
    plain, planned = _pair(_sgd)
    for seed in range(4):
        for model, optimizer in (plain, planned):
            model(_batch(seed)).backward()
            optimizer.step()
            if seed % 2:
                optimizer.zero_grad(set_to_none=False)
            else:
                for parameter in model.parameters():
                    parameter.grad = None
    _assert_same(plain, planned)
    with lowtide.accumulating(planned[0]):  # a gradient comes to one that was set to zero
        planned[0](_batch(5)).backward()
    planned[1].step()
    _step(*plain, _batch(5))
    planned[1].zero_grad()
    _assert_same(plain, planned)


def test_gradients_come_without_a_plan_to_those_that_were_set_to_zero() -> None:
    """A call in evaluation mode."""
    pair = _pair(_sgd)
    for model, optimizer in pair:
        for seed in range(4):
            model.train(seed != 1)
            model(_batch(seed)).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    _assert_same(*pair)


def test_a_loss_that_uses_parameters_outside_of_the_model_is_refused() -> None:
    _, (model, optimizer) = _pair(_sgd)
    head: Any = model.get_submodule("head")
    for penalty in (lambda: head.weight.square().sum(), lambda: head.bias.abs().sum()):
        with pytest.raises(lowtide.ExecutionError, match=r"a penalty on weights, say"):
            (model(_batch(0)) + 0.01 * penalty()).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("together", [True, False])
def test_two_calls_before_their_backward_passes(together: bool) -> None:
    plain, planned = _pair(_sgd)
    for seed in range(4):
        for model, optimizer in (plain, planned):
            losses = [model(_batch(seed)), model(_batch(10 + seed))]
            for loss in [losses[0] + losses[1]] if together else losses:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    _assert_same(plain, planned)


class _OnAnother(nn.Module):
    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x)).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("swapped", [False, True])
def test_two_planned_models_with_the_same_parameters(swapped: bool) -> None:
    """One loss of both: each gradient of what they share is a sum, which neither may use before the other has added to it."""
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    plain = nn.ModuleList([_OnAnother(encoder), _OnAnother(encoder)])
    planned = copy.deepcopy(plain)
    pairs = [(both, _sgd(both)) for both in (plain, planned)]
    for one in planned:
        lowtide.rematerialize(one, (_batch(0),), budget="100%", planner="keep-all", optimizer=pairs[1][1])
    for seed in range(3):
        for both, optimizer in pairs:
            first, second = reversed(both) if swapped else both
            (first(_batch(seed)) + 2 * second(_batch(10 + seed))).backward()
            optimizer.step()
            optimizer.zero_grad()
            _step(first, optimizer, _batch(20 + seed))  # alone it updates as it goes
    _assert_same(*pairs)


def test_asking_for_gradients_updates_nothing() -> None:
    plain, planned = _pair(_sgd)
    wanted = [
        torch.autograd.grad(model(_batch(0)), list(model.get_submodule("head").parameters()))
        for model, _ in (plain, planned)
    ]
    assert all(map(torch.equal, *wanted))
    _assert_same(plain, planned)
    for model, optimizer in (plain, planned):
        model(_batch(0)).backward(inputs=list(model.get_submodule("head").parameters()))
        optimizer.step()
        optimizer.zero_grad()
        _step(model, optimizer, _batch(1))
    _assert_same(plain, planned)


def test_parameters_are_not_written_between_the_backward_pass_and_the_step() -> None:
    """By hand, with values that a plain loop would still have: the updates have been made."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    lowtide.rematerialize(model, (x,), budget="100%", planner="keep-all", optimizer=optimizer)
    for writes in (False, True):
        model(x).square().mean().backward()
        if writes:
            with torch.no_grad():
                model[0].weight.mul_(0.9)
            with pytest.raises(lowtide.ExecutionError, match="1 parameters of Sequential were written"):
                optimizer.step()
        optimizer.step()
        optimizer.zero_grad()


def test_parameters_frozen_before_the_backward_pass_are_not_updated() -> None:
    plain, planned = _pair(OPTIMIZERS["adamw"])
    for seed in range(3):
        for model, optimizer in (plain, planned):
            loss = model(_batch(seed))
            model.get_submodule("blocks.1").requires_grad_(seed != 1)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            model.requires_grad_(True).get_submodule("frozen").requires_grad_(False)
    assert _updates(planned[0]) == 20
    _assert_same(plain, planned)


def test_states_that_were_cleared_come_back_in_order() -> None:
    plain, planned = _pair(OPTIMIZERS["adamw"])
    for model, optimizer in (plain, planned):
        _step(model, optimizer, _batch(0))
        optimizer.state.clear()
        _step(model, optimizer, _batch(1))
    _assert_same(plain, planned)


def _zero(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad.zero_()


@pytest.mark.parametrize(
    "replace",
    [lambda one: setattr(one, "grad", None), lambda one: setattr(one, "grad", torch.ones_like(one)), _zero],
    ids=["taken away", "another", "zeros"],
)
def test_gradients_are_not_replaced_between_the_backward_pass_and_the_step(
    replace: Callable[[nn.Parameter], None],
) -> None:
    _, (model, optimizer) = _pair(_sgd)
    for seed in range(2):
        model(_batch(seed)).backward()
        replace(model.get_submodule("head").weight)  # type: ignore[arg-type]
        with pytest.raises(
            lowtide.ExecutionError, match="gradients of 1 parameters of Net were replaced or set to zero"
        ):
            optimizer.step()
        optimizer.step()
        optimizer.zero_grad()


def test_hooks_of_parameters_see_gradients() -> None:
    plain, planned = _pair(_sgd)
    seen: list[float] = []
    for model, optimizer in (plain, planned):
        head: Any = model.get_submodule("head")
        head.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        head.bias.register_post_accumulate_grad_hook(lambda parameter: seen.append(float(parameter.grad.sum())))
        for seed in range(2):
            _step(model, optimizer, _batch(seed))
    assert _updates(planned[0]) == 18
    assert seen[:2] == seen[2:]
    _assert_same(plain, planned)


def test_no_parameter_is_updated_twice_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    _, (model, optimizer) = _pair(OPTIMIZERS["adamw"])
    _step(model, optimizer, _batch(0))
    updates: list[int] = []
    (owner,) = model.forward.optimizer.of  # type: ignore[union-attr]
    update = owner.update

    def failing(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        if len(updates) == 5:
            updates.append(0)
            raise MemoryError("in the middle")
        updates.append(id(parameter))
        update(parameter, gradient)

    monkeypatch.setattr(owner, "update", failing)
    with pytest.raises(MemoryError) as caught:
        model(_batch(1)).backward()
    assert "5 parameters of Net had been updated before this error" in " ".join(caught.value.__notes__)
    optimizer.zero_grad()
    model(_batch(2)).backward()
    optimizer.step()
    optimizer.zero_grad()
    steps = {int(state["step"]) for state in optimizer.state.values()}
    assert steps == {2}
    _step(model, optimizer, _batch(3))
    assert {int(state["step"]) for state in optimizer.state.values()} == {3}


class _Norm(optim.SGD):
    """Its updates depend on all gradients at once."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.01)
        return super().step(closure)


@pytest.mark.parametrize("kind", ["lbfgs", "own step"])
def test_optimizers_that_need_all_gradients_keep_them(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    def make(model: nn.Module) -> optim.Optimizer:
        return optim.LBFGS(model.parameters(), max_iter=2) if kind == "lbfgs" else _Norm(model.parameters(), 0.1)

    plain, planned = _pair(make)
    for seed in range(2):
        for model, optimizer in (plain, planned):
            _step_with_closure(model, optimizer, seed)
    _assert_same(plain, planned)
    assert sum("treat every parameter by itself" in record.message for record in caplog.records) == 1


def test_parameters_that_share_memory_are_left_to_the_step() -> None:
    def make(model: nn.Module) -> optim.Optimizer:
        model.get_submodule("blocks.0.up").weight.data = model.get_submodule("blocks.1.up").weight.data  # type: ignore[union-attr]
        return _sgd(model)

    plain, planned = _pair(make)
    assert _updates(planned[0]) == 18
    for seed in range(3):
        _step(*plain, _batch(seed))
        _step(*planned, _batch(seed))
    _assert_same(plain, planned)


def test_parts_and_the_online_mode_keep_gradients(caplog: pytest.LogCaptureFixture) -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Block(), Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.one(x) if x.sum() > 0 else x * 2
            return self.two(x).square().mean()

    def make(model: nn.Module) -> optim.Optimizer:
        return OPTIMIZERS["adamw"](model)

    torch.manual_seed(0)
    plain = Branching()
    model = copy.deepcopy(plain)
    pair = (plain, make(plain)), (model, make(model))
    lowtide.rematerialize(model, (_batch(0),), budget="1GiB", planner="greedy", optimizer=pair[1][1])
    for sign in (-1, 1, 1):  # states of the first block come after those of the second
        _step(*pair[0], sign * _batch(0).abs())
        _step(*pair[1], sign * _batch(0).abs())
    _assert_same(*pair)
    assert any("the model runs in parts" in record.message for record in caplog.records)


def test_new_shapes_and_families() -> None:
    plain, planned = _pair(OPTIMIZERS["adamw"])
    for seed, rows in enumerate((48, 20, 33, 27, 48, 61)):
        x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(_step(*plain, x), _step(*planned, x))
    _assert_same(plain, planned)
    x = torch.randn(61, WIDTH)
    assert lowtide.measure(lambda: planned[0](x).backward()).peak_bytes == lowtide.plans(planned[0])[-1].peak_bytes
    assert all(any(op.target == OPTIMIZER_TARGET for op in plan.graph.ops) for plan in lowtide.plans(planned[0]))


def test_total_budgets_do_not_count_gradients_that_are_gone() -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = _sgd(model)
    lowtide.rematerialize(model, (_batch(0),), total_budget="1GiB", optimizer=optimizer)
    plan = lowtide.plans(model)[0]
    momentum = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    held = sum(p.nbytes for p in model.parameters())
    assert plan.budget_bytes == (1 << 30) - held - momentum - _batch(0).nbytes


def test_restore_ends_it() -> None:
    plain, planned = _pair(_sgd)
    _step(*plain, _batch(0))
    _step(*planned, _batch(0))
    lowtide.restore(planned[0])
    assert not planned[1]._optimizer_step_pre_hooks
    for seed in range(1, 3):
        _step(*plain, _batch(seed))
        _step(*planned, _batch(seed))
    _assert_same(plain, planned)


@pytest.mark.parametrize(
    "options", [{}, {"keep_gradients": True}, {"total_budget": "1MiB", "offload": "disk"}], ids=str
)
def test_a_model_may_be_restored_between_its_passes(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain = Net()
    planned = copy.deepcopy(plain)
    pairs = [(model, _sgd(model)) for model in (plain, planned)]
    budget = {} if "total_budget" in options else {"budget": "100%"}
    lowtide.rematerialize(planned, (_batch(0),), planner="keep-all", optimizer=pairs[1][1], **(budget | options))
    for seed in range(3):
        for model, optimizer in pairs:
            loss = model(_batch(seed))
            if model is planned and seed == 1:
                lowtide.restore(model)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    _assert_same(*pairs)


def test_a_model_may_be_moved_between_steps() -> None:
    plain, planned = _pair(_sgd)
    for model, optimizer in (plain, planned):
        model(_batch(0)).backward()
        optimizer.step()
        model.double()
        assert all(p.grad is None or p.grad.dtype == torch.float64 for p in model.parameters())
        optimizer.zero_grad()
        model(_batch(1).double()).backward()
        optimizer.step()
    _assert_same(plain, planned)


def test_no_budget_is_out_of_reach_because_of_updates(caplog: pytest.LogCaptureFixture) -> None:
    """What backward operators that run again can save at the least budgets, updates between them cannot."""

    def made() -> tuple[nn.Module, optim.Optimizer]:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.SiLU()) for _ in range(8)]
        model = WithLoss(nn.Sequential(*layers))
        return model, _sgd(model)

    x = torch.randn(2, 4, 16, 16)
    planner: dict[str, Any] = {"planner": QUICK, "planning": "wait"}
    with pytest.raises(lowtide.InfeasibleBudgetError) as caught:
        lowtide.rematerialize(made()[0], (x,), budget=1000, **planner)
    plain, planned = made(), made()
    lowtide.rematerialize(planned[0], (x,), budget=caught.value.minimum_bytes, optimizer=planned[1], **planner)
    if not _updates(planned[0]):
        assert any("does not fit the budget" in record.message for record in caplog.records)
    for _ in range(2):
        assert torch.equal(_step(*plain, x), _step(*planned, x))
    _assert_same(plain, planned)


def test_several_processes_keep_gradients(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain, planned = _pair(_sgd)
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        shared = nn.parallel.DistributedDataParallel(planned[0], find_unused_parameters=True)
        for seed in range(2):
            _step(*plain, _batch(seed))
            _step(shared, planned[1], _batch(seed))
        _assert_same(plain, planned)
    finally:
        torch.distributed.destroy_process_group()
    assert sum("several processes exchange them" in record.message for record in caplog.records) == 1


def test_a_plan_that_cannot_be_made_leaves_the_optimizer_alone() -> None:
    model = Net()
    optimizer = _sgd(model)
    with pytest.raises(lowtide.InfeasibleBudgetError):
        lowtide.rematerialize(model, (_batch(0),), budget=1000, optimizer=optimizer)
    assert not optimizer._optimizer_step_pre_hooks


def test_bad_input() -> None:
    with pytest.raises(
        lowtide.PlanError, match=r"optimizer= takes a torch.optim.Optimizer, or a sequence of them, not str"
    ):
        lowtide.rematerialize(Net(), (_batch(0),), budget="80%", optimizer="SGD")  # type: ignore[arg-type]
    with pytest.raises(lowtide.PlanError, match="empty sequence"):
        lowtide.rematerialize(Net(), (_batch(0),), budget="80%", optimizer=[])
    with pytest.raises(lowtide.PlanError, match=r"the same parameter \(.+\), \d+ in all"):
        lowtide.rematerialize(model := Net(), (_batch(0),), budget="80%", optimizer=[_sgd(model), _sgd(model)])
    with pytest.raises(lowtide.PlanError, match="none of the model's parameters"):
        lowtide.rematerialize(Net(), (_batch(0),), budget="80%", optimizer=_sgd(Net()))
    with pytest.raises(lowtide.PlanError, match="arena=True do not go together"):
        lowtide.rematerialize(model := Net(), (_batch(0),), budget="80%", arena=True, optimizer=_sgd(model))
    with pytest.raises(lowtide.PlanError, match="is not rematerialized"):
        lowtide.accumulating(Net())


@pytest.fixture(autouse=True)
def _warnings_of_lowtide(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="lowtide")
