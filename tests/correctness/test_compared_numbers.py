"""Numbers that differ from call to call and are only compared, or counted on, take a capture where an answer changes."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lowtide
from lowtide.capture import Known, capture
from tests.fuzz.changed import Computes, Thing, Turned, having, rows

STEPS = 10
Compute = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]


def _trained(compute: Compute, attributes: dict[str, Callable[[], Any]], set_to: Callable[[Any, int], None]) -> Any:
    """What ``STEPS`` steps compute and leave behind in eager, the same planned, and the planned model."""
    found = []
    for planned in (False, True):
        torch.manual_seed(0)
        random.seed(0)
        model = Computes(compute, having(**attributes))
        if planned:
            lowtide.rematerialize(model, budget="100%", planner="greedy", dynamic=False)
        states: list[Any] = []
        for step in range(STEPS):
            set_to(model, step)
            model.zero_grad()
            loss = model(rows() + step)
            loss.backward()
            numbers = {name: value for name, value in vars(model).items() if isinstance(value, (int, float))}
            states.append((loss.item(), model.linear.weight.grad.tolist(), repr(numbers)))
        found.append(states)
    return *found, model


def _captures(caplog: pytest.LogCaptureFixture) -> int:
    return 1 + caplog.text.count("is captured again")


def _to_step(model: Any, step: int) -> None:
    model.step = step


def _nothing(model: Any, step: int) -> None:
    pass


def _to_state(model: Any, step: int) -> None:
    model.state.step = step


def _to_share(model: Any, step: int) -> None:
    model.share = step / STEPS


def _doubled_at_first(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y * 2 if self.step < 6 else y


def _counting(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    self.step += 1
    return _doubled_at_first(self, y, x)


def _as_state(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y.relu() if not self.state.step > 4 else y


def _cyclic(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y = y * 2 if self.step % 4 == 1 else y
    return y + 1 if (self.step + 1) / 10 > 0.55 else y


def _between(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y.sin() if self.share > 0.25 and -self.share != -0.5 else y


def _as_often(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    for number in range(3):
        if number < self.step:
            y = y.sin()
    return y


def _kept_at_first(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    if self.calls == 0:
        self.center = x.mean(0)
    self.calls += 1
    return y - self.center


def _counted_twice(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    self.step += 1
    self.step = self.step * 2 - 1
    self.total += 0.5
    return y if self.step > 20 or self.total >= 3 else y.exp()


def _counted_below(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    self.state.step += 1
    return _as_state(self, y, x)


def _every_third_time(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    self.left -= 1
    if self.left == 0:
        self.left = 3
        return y * 2
    return y


def _in_turn(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y = y * [0.5, 1.0, 2.0][self.step % 3]
    for _ in range(self.step % 3):
        y = torch.tanh(y)
    self.step += 1
    return y * {"0": 2.0, "1": 1.0, "2": 3.0}[str(self.step % 3)]


def _drawn_beside_numpy(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    for keep in self.keep:  # of NumPy's, on the left
        if keep > random.random():
            y = y.sin()
    return y if np.isinf(random.random()) or np.float32(2) <= random.random() else y * 2


CASES: dict[str, tuple[Compute, dict[str, Callable[[], Any]], Callable[[Any, int], None], int]] = {
    "a number of the loop's": (_doubled_at_first, {"step": int}, _to_step, 3),
    "after other operations": (_cyclic, {"step": int}, _to_step, 6),
    "in an object": (_as_state, {"state": lambda: Thing(step=0)}, _to_state, 3),
    "a share": (_between, {"share": float}, _to_share, 5),
    "in a loop": (_as_often, {"step": int}, _to_step, 4),
    "down, and from the start again": (_every_third_time, {"left": lambda: 2}, _nothing, 2),
    "a number of its own": (_counting, {"step": int}, _nothing, 2),
    "counted by several operations": (_counted_twice, {"step": int, "total": float}, _nothing, 2),
    "a tensor of the first call": (_kept_at_first, {"calls": int}, _nothing, 2),
    "one of few, as an index, a length and a text": (_in_turn, {"step": int}, _nothing, 4),
    "counted in an object": (_counted_below, {"state": lambda: Thing(step=0)}, _nothing, 2),
    "drawn, and a number of NumPy's": (_drawn_beside_numpy, {"keep": lambda: np.linspace(1, 0.5, 2)}, _nothing, 2),
}


@pytest.mark.parametrize("case", CASES)
def test_numbers_that_are_compared(case: str, caplog: pytest.LogCaptureFixture) -> None:
    compute, attributes, set_to, captures = CASES[case]
    with caplog.at_level(logging.INFO, logger="lowtide"):
        plain, planned, model = _trained(compute, attributes, set_to)
    assert planned == plain
    assert _captures(caplog) <= captures
    assert model.forward.parts is None and not model.forward.is_online
    with lowtide.checked(every=1):
        model(rows()).backward()


def _scaled(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y * self.step if self.step < 6 else y


def _filled(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y + torch.full((4,), self.step) if self.step < 6 else y


def _left(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    self.last = self.step / 2
    return _doubled_at_first(self, y, x)


def _as_text(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y * len(f"{self.step:b}")


def _looked_up(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y * {0: 1.5, 1: 2.5}.get(self.step, 3.5)


def _least(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y * min(self.step, 4)


def _of_both(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    self.other = self.step
    return y if self.other < 5 else y * 2


def _annealed(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    self.share = self.share * 0.5 + 0.1
    return y if self.share < 0.19 else y * 2


def _read_outside(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return _as_state(self, y, x) * SHARED.step


def _in_backward(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y = Turned.apply(y, self)
    return y * 2 if self.number < 6 else y


def _to_number(model: Any, step: int) -> None:
    model.number = step


def _in_all_attributes(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y = y.clone()
    y.register_hook(lambda gradient: gradient * (vars(self)["step"] + 1))
    return _doubled_at_first(self, y, x)


def _by_type(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return _doubled_at_first(self, y * 3 if type(self.step) is int else y, x)


def _caught(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    try:
        return y * 2 if self.step & 1 else y
    except TypeError:
        return y * 5


def _where_there_is_one(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y * 2 if self.number is not None else y


def _to_number_or_none(model: Any, step: int) -> None:
    model.number = None if step % 4 == 3 else step


def _root(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y = y * 2 if self.width > 3 else y
    return y * 3 if self.step < 3 and self.width**0.5 < 2 else y


def _to_narrower(model: Any, step: int) -> None:
    model.step, model.width = step, 4 - step


SHARED = Thing(step=0)
USED_OTHERWISE: dict[str, tuple[Any, ...]] = {
    "read in a variable, too": (_read_outside, {"state": lambda: SHARED}, _to_state),
    "computed with in the backward pass": (_in_backward, {"number": int}, _to_number),
    "among all attributes in the backward pass": (_in_all_attributes, {"step": int}),
    "told by its class": (_by_type, {"step": int}),
    "by bits, caught": (_caught, {"step": int}),
    "sometimes none": (_where_there_is_one, {"number": int}, _to_number_or_none),
    "without a root": (_root, {"step": int, "width": int}, _to_narrower),
    "multiplied with a tensor": (_scaled, {"step": int}),
    "put into a tensor": (_filled, {"step": int}),
    "left in another attribute": (_left, {"step": int, "last": float}),
    "as text": (_as_text, {"step": int}),
    "as a key": (_looked_up, {"step": int}),
    "the least of two": (_least, {"step": int}),
    "another one's place": (_of_both, {"step": int, "other": int}),
    "a share that goes on": (_annealed, {"step": int, "share": float}),
}


@pytest.mark.parametrize("compute", [_least, _scaled])
def test_numbers_that_come_to_a_bound(compute: Compute, caplog: pytest.LogCaptureFixture) -> None:
    """What is computed with takes a capture in each call, but not for ever: soon it is compared alone."""
    with caplog.at_level(logging.INFO, logger="lowtide"):
        plain, planned, model = _trained(compute, {"step": int}, _to_step)
    assert planned == plain
    assert _captures(caplog) <= 7
    with lowtide.checked(every=1):
        model(rows()).backward()


class _Warmed(nn.Module):
    """Its share grows until a step that is ``last``, by amounts that no operator's argument follows from."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.step, self.last = 0, last
        self.body = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share = 1.0 if self.step >= self.last else float(f"{self.step / self.last:.4f}")
        return self.body(x).square().mean() * share


@pytest.mark.parametrize(("last", "stays_whole"), [(5, True), (1000, False)])
def test_far_bounds_take_models_apart(last: int, stays_whole: bool) -> None:
    torch.manual_seed(0)
    plain = _Warmed(last)
    planned, x = copy.deepcopy(plain), torch.randn(64, 16)
    lowtide.rematerialize(planned, budget="100%", planner="greedy")
    for step in range(9):
        for model in (plain, planned):
            model.step = step
            model.zero_grad()
            model(x).backward()
        for one, two in zip(plain.parameters(), planned.parameters(), strict=True):
            assert one.grad is not None and two.grad is not None and torch.equal(one.grad, two.grad)
    assert (planned.forward.parts is None and not planned.forward.is_online) == stays_whole


@pytest.mark.parametrize("case", USED_OTHERWISE)
def test_numbers_that_are_used_otherwise(case: str) -> None:
    compute, attributes, *set_to = USED_OTHERWISE[case]
    plain, planned, _ = _trained(compute, attributes, *set_to or [_to_step])
    assert planned == plain


def test_a_result_with_the_number() -> None:
    class Tells(Computes):
        def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
            return super().forward(x), self.step

    model = Tells(_doubled_at_first, having(step=int))
    lowtide.rematerialize(model, budget="100%", planner="greedy")
    for step in range(4):
        model.step = step
        loss, number = model(rows())
        loss.backward()
        assert type(number) is int and number == step


def test_a_drawn_number_in_the_result() -> None:
    class Tells(Computes):
        def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
            return super().forward(x), random.random()

    model = Tells(lambda self, y, x: y)
    lowtide.rematerialize(model, budget="100%", planner="greedy")
    for seed in range(3):
        random.seed(seed)
        expected = random.random()
        random.seed(seed)
        loss, number = model(rows())
        loss.backward()
        assert type(number) is float and number == expected


def test_drawn_numbers_after_other_operations() -> None:
    def dropped(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return y * 2 if 1 - random.random() * 2 < 0.2 else y

    plain, planned, model = _trained(dropped, {}, _nothing)
    assert planned == plain
    assert len(lowtide.plans(model)) == 2


def _checked(items: list[torch.Tensor], *, __beartype_getrandbits: Callable[[int], int] = random.getrandbits) -> None:
    """As beartype does: one item of a container, drawn each time, stands for all."""
    assert isinstance(items[__beartype_getrandbits(32) % len(items)], torch.Tensor)


class Checks(Computes):
    def forward(self, x: torch.Tensor, *others: Any) -> torch.Tensor:
        _checked([x, x])
        dropped = random.random() < 0.5
        _checked([x])
        return super().forward(x * 2 if dropped else x)


def test_draws_that_choose_what_is_checked(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lowtide")
    found = []
    for planned in (False, True):
        random.seed(0)
        torch.manual_seed(0)
        model = Checks(lambda self, y, x: y)
        if planned:
            lowtide.rematerialize(model, budget="100%", planner="greedy")
        losses = []
        for _ in range(STEPS):
            loss = model(rows())
            loss.backward()
            losses.append(loss.item())
        found.append((losses, random.getstate()))
    assert found[0] == found[1]
    assert len(lowtide.plans(model)) == len({*found[0][0]}) == 2
    assert _captures(caplog) <= 3  # another thread that draws during a capture makes one more, not one for each call
    assert _checked.__kwdefaults__["__beartype_getrandbits"] is random.getrandbits


def test_lengths_beside_a_number() -> None:
    """A family of shapes holds for other numbers, too."""
    states = []
    for planned in (False, True):
        torch.manual_seed(0)
        model = Computes(_counting, having(step=int))
        if planned:
            lowtide.rematerialize(model, budget="100%", planner="greedy")
        found = []
        for step in range(STEPS):
            model.zero_grad()
            loss = model(torch.randn(3 + step % 5, 4, generator=torch.Generator().manual_seed(step)))
            loss.backward()
            found.append((loss.detach(), model.linear.weight.grad, model.step))
        states.append(found)
    torch.testing.assert_close(*states, rtol=0, atol=0)


def test_a_count_when_another_gradient_arrives() -> None:
    """The backward pass captures the call anew, as it was before it counted."""

    class Two(Computes):
        def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
            self.step += 1
            y = torch.tanh(self.linear(x))
            return (y if self.step < 3 else y * 2), y.square()

    models = [Two(lambda self, y, x: y, having(step=int)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    lowtide.rematerialize(models[1], budget="100%", planner="greedy")
    for step in range(5):
        for model in models:
            model.zero_grad()
            model(rows())[step % 2].sum().backward()
        assert torch.equal(*(model.linear.weight.grad for model in models))
    assert [model.step for model in models] == [5, 5]


def test_the_contract_says_how_it_counts() -> None:
    model = Computes(_counting, having(step=int))
    captured = capture(model, (rows(),), known=Known())
    (counted,) = captured.contract.counted
    assert counted.place == ("", "step") and counted.change(7) == ("set", 8) and model.step == 0
    assert list(captured.contract.conditions.compared()) == [("attribute", id(model), "step")]
