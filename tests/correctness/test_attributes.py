"""What a forward pass leaves in attributes: results are assigned, caches and counters noticed, state refused."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.capture import capture
from tests.support.training import make

WIDTH = 16


class _Noting(nn.Module):
    """Four blocks; ``note(self, block, x, h)`` writes attributes of the model or of a block."""

    def __init__(self, note: Callable[..., Any], **attributes: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.note = note
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x
        for block in self.blocks:
            h = h + block(h)
            extra = self.note(self, block, x, h)
            h = h if extra is None else h + extra
        return h.square().mean()


def _input(iteration: int) -> torch.Tensor:
    return torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(iteration))


Read = Callable[[Any], list[torch.Tensor]]


def _trained(model: nn.Module, read: Read = lambda model: [], weight: float = 0.0) -> list[Any]:
    """Three steps of SGD, also on what ``read`` finds in the model's attributes where ``weight`` is not 0."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    states = []
    for iteration in range(3):
        optimizer.zero_grad()
        loss = model(_input(iteration))
        found = read(model)
        (loss + weight * sum(tensor.square().mean() for tensor in found) if weight else loss).backward()
        states.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
        states.append([(tensor.detach().clone(), tensor.requires_grad) for tensor in found])
        optimizer.step()
    return states


def _assert_trains_as_eager(factory: Callable[[], nn.Module], budget: str, **options: Any) -> None:
    plain, planned = make(factory), make(factory)
    lowtide.rematerialize(planned, (_input(0),), budget=budget, planner="greedy")
    expected, actual = _trained(plain, **options), _trained(planned, **options)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def _auxiliary(model: Any, block: Any, x: torch.Tensor, h: torch.Tensor) -> None:
    block.auxiliary = h.abs().sum()


def _maps(model: Any, block: Any, x: torch.Tensor, h: torch.Tensor) -> None:
    block.map = torch.softmax(h @ h.T, -1).detach()


def _list(model: Any, block: Any, x: torch.Tensor, h: torch.Tensor) -> None:
    model.losses = [h.mean(), {"inner": h.std()}]


def _record(model: Any, block: Any, x: torch.Tensor, h: torch.Tensor) -> None:
    block.record = SimpleNamespace(hidden=h * 2, name="hidden")


def _latest(model: Any, block: Any, x: torch.Tensor, h: torch.Tensor) -> None:
    model.last, model.row = x, h[0]


def _appended(model: Any, block: Any, x: torch.Tensor, h: torch.Tensor) -> None:
    model.losses.append(h.mean())


def _refilled(model: Any, block: Any, x: torch.Tensor, h: torch.Tensor) -> None:
    if block is model.blocks[0]:
        model.losses.clear()
    model.losses.append(h.mean())


def _updated(model: Any, block: Any, x: torch.Tensor, h: torch.Tensor) -> None:
    model.found["first" if block is model.blocks[0] else "last"] = h.mean()


def _emptied(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    found = list(tensors)
    tensors.clear()
    return found


READS: dict[Callable[..., Any], Read] = {
    _auxiliary: lambda model: [block.auxiliary for block in model.blocks],
    _maps: lambda model: [block.map for block in model.blocks],
    _list: lambda model: [model.losses[0], model.losses[1]["inner"]],
    _record: lambda model: [block.record.hidden for block in model.blocks],
    _latest: lambda model: [model.last, model.row],
}


@pytest.mark.parametrize("weight", [0.0, 0.5])
@pytest.mark.parametrize("note", READS, ids=lambda note: note.__name__)
def test_what_every_call_leaves_is_there(note: Callable[..., Any], weight: float) -> None:
    """As eager has it, to the bit, also where the caller trains on it."""
    _assert_trains_as_eager(lambda: _Noting(note), "90%", read=READS[note], weight=weight)


@pytest.mark.parametrize(
    ("note", "attributes", "read", "weight"),
    [
        (_appended, lambda: {"losses": []}, lambda model: _emptied(model.losses), 0.5),
        (_appended, lambda: {"losses": []}, lambda model: list(model.losses), 0.0),
        (_appended, lambda: {"losses": deque(maxlen=6)}, lambda model: list(model.losses), 0.0),
        (_refilled, lambda: {"losses": []}, lambda model: list(model.losses), 0.0),
        (_refilled, lambda: {"losses": deque()}, lambda model: list(model.losses), 0.5),
        (_updated, lambda: {"found": {"other": 1}}, lambda model: [model.found["first"], model.found["last"]], 0.5),
    ],
    ids=["emptied list", "growing list", "deque", "refilled list", "refilled deque", "dictionary"],
)
def test_containers_are_written_in_place(
    note: Callable[..., Any], attributes: Callable[[], dict[str, Any]], read: Read, weight: float
) -> None:
    """By the caller's own reference, too."""
    held: list[Any] = []

    def factory() -> nn.Module:
        given = attributes()
        held.extend(given.values())
        return _Noting(note, **given)

    _assert_trains_as_eager(factory, "100%", read=read, weight=weight)
    assert len(held[-1]) == len(held[-2])


def test_other_shapes_after_attributes_were_assigned() -> None:
    model = make(lambda: _Noting(_list))
    lowtide.rematerialize(model, budget="100%", planner="keep-all")
    for rows in (8, 5, 8):
        model(torch.randn(rows, WIDTH)).backward()
        assert model.losses[1]["inner"].requires_grad
    assert len(lowtide.plans(model)) == 2


def test_what_is_left_is_released_with_the_next_call() -> None:
    model = make(lambda: _Noting(_maps))
    lowtide.rematerialize(model, budget="100%", planner="keep-all")
    for _ in range(2):
        model(_input(0)).backward()
    levels = [lowtide.measure(lambda: model(_input(0)).backward()).final_bytes for _ in range(3)]
    assert levels == [0, 0, 0]


def _cached(model: Any, block: Any, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    if model.mask is None:
        model.mask = torch.ones(WIDTH, WIDTH).tril()
    return h @ model.mask


def test_a_constant_that_is_made_once() -> None:
    """Made in every call instead: the same bits."""
    _assert_trains_as_eager(lambda: _Noting(_cached, mask=None), "100%")


def _counted(model: Any, block: Any, x: torch.Tensor, h: torch.Tensor) -> None:
    model.calls += 1


def test_a_counter_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="lowtide"):
        capture(_Noting(_counted, calls=0), (_input(0),))
    assert "changes plain attributes (calls) in every call" in caplog.text


def _flag(model: Any, block: Any, x: torch.Tensor, h: torch.Tensor) -> None:
    model.ready = True


def test_a_flag_is_not(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="lowtide"):
        capture(_Noting(_flag, ready=False), (_input(0),))
    assert not caplog.text


def _annealed(model: Any, block: Any, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    model.calls += 1
    return h * (1 / model.calls)


def _switched(model: Any, block: Any, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor | None:
    first, model.warm = not model.warm, True
    return h.sin() if first else None


def _carried(model: Any, block: Any, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    before = torch.zeros_like(h) if model.hidden is None else model.hidden
    model.hidden = h.detach() + before
    return before


def _average(model: Any, block: Any, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    model.hidden = 0.9 * model.hidden + 0.1 * h.detach().mean(0)
    result: torch.Tensor = model.hidden
    return result


def _of_the_first_input(model: Any, block: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    if model.hidden is None:
        model.hidden = x.detach().mean(0)
    return model.hidden


def _first_input(model: Any, block: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    if model.hidden is None:
        model.hidden = x
    return model.hidden


def _noise(model: Any, block: Any, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    if model.hidden is None:
        model.hidden = torch.randn(WIDTH)
    return h * model.hidden


def _growing(model: Any, block: Any, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    model.seen = [*model.seen, h.mean().detach()]
    return torch.stack(model.seen).sum()


def _replaced(model: Any, block: Any, x: torch.Tensor, h: torch.Tensor) -> None:
    if not hasattr(model, "late"):
        model.late = nn.Identity()


REFUSED: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (_annealed, {"calls": 0}, "depends on attributes"),
    (_switched, {"warm": False}, "depends on attributes"),
    (_carried, {"hidden": None}, "computes with what an earlier one left"),
    (_average, {"hidden": torch.zeros(WIDTH)}, "computes with what an earlier one left"),
    (_of_the_first_input, {"hidden": None}, "computes with what an earlier one left"),
    (_first_input, {"hidden": None}, "computes with what an earlier one left"),
    (_noise, {"hidden": None}, "computes with what an earlier one left"),
    (_growing, {"seen": ()}, "computes with what an earlier one left"),
    (_replaced, {}, "replaces submodules"),
]


@pytest.mark.parametrize(("note", "attributes", "message"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_state_in_attributes_is_refused(note: Callable[..., Any], attributes: dict[str, Any], message: str) -> None:
    model = _Noting(note, **attributes)
    with pytest.raises(lowtide.CaptureError, match=message):
        capture(model, (_input(0),))
    assert all(vars(model)[name] is value for name, value in attributes.items())


@pytest.mark.parametrize("note", [_of_the_first_input, _first_input, _noise, _replaced], ids=lambda note: note.__name__)
def test_what_the_first_call_prepares(note: Callable[..., Any]) -> None:
    """As the error says: call the model once before."""

    def called() -> nn.Module:
        model = _Noting(note, hidden=None)
        with torch.no_grad():
            model(_input(7))
        return model

    _assert_trains_as_eager(called, "100%")


@dataclass
class _Strict:
    """A configuration that refuses to answer for a field, as heterogeneous models of ``transformers`` have."""

    width: int = WIDTH
    heads: int = 4

    def __getattribute__(self, name: str) -> Any:
        if name == "heads":
            raise RuntimeError("heads differ from layer to layer")
        return super().__getattribute__(name)


def test_configurations_may_refuse_to_answer() -> None:
    def note(model: Any, block: nn.Module, x: torch.Tensor, h: torch.Tensor) -> None:
        assert model.config.width == WIDTH

    plain, planned = (make(lambda: _Noting(note, config=_Strict())) for _ in range(2))
    lowtide.rematerialize(planned, (_input(0),), budget="70%", planner="greedy")
    for expected, found in zip(_trained(plain), _trained(planned), strict=True):
        assert all(map(torch.equal, expected, found))
