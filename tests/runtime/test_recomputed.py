"""Modules that are no programs, run again in the backward pass: ``parts.recomputed``."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.runtime.parts.decisions import recording, replaying
from lowtide.runtime.parts.recomputed import Recomputation


class _Ragged(nn.Module):
    """Attention within rows of several lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [project(x).unflatten(-1, (2, 8)).transpose(1, 2) for project in self.projections]
        return nn.functional.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(-2)


@pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning")
def test_nested_tensors() -> None:
    torch.manual_seed(0)
    model = _Ragged()
    plain = copy.deepcopy(model)
    rows = torch.nested.nested_tensor([torch.randn(length, 16) for length in (3, 5, 2)], layout=torch.jagged)
    ran: list[bool] = []
    found = Recomputation().run(model, model.forward, (rows,), {}, lambda: ran.append(True))
    expected = plain(rows)
    assert torch.equal(found.values(), expected.values())
    for result in (found, expected):
        torch.nested.to_padded_tensor(result, 0.0).square().sum().backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert ran and all(torch.equal(own.grad, other.grad) for own, other in pairs)


class _Masks(nn.Module):
    """Reads a table that is large beside what it computes, and writes into another one at times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.register_buffer("table", torch.randn(4096, 16))
        self.register_buffer("sums", torch.zeros(2048, 16))

    def forward(self, x: torch.Tensor, writes: bool) -> torch.Tensor:
        hidden = self.layer(x) * self.table[: x.shape[0]] + self.sums[0]
        if writes:
            self.sums[:4].add_(hidden.detach())
        return torch.tanh(hidden * self.sums[1])


@pytest.mark.parametrize("writes", [True, False])
def test_large_buffers_are_copied_where_they_are_written_into(writes: bool) -> None:
    torch.manual_seed(0)
    model, x = _Masks(), torch.randn(4, 16)
    model.sums += 1
    plain = copy.deepcopy(model)
    expected, found = plain(x, writes), None

    def run() -> None:
        nonlocal found
        found = Recomputation().run(model, model.forward, (x, writes), {}, lambda: None)

    peak = lowtide.measure(run).peak_bytes
    assert (peak > model.table.nbytes / 2) == writes and peak < model.table.nbytes
    for result in (found, expected):
        assert result is not None
        result.square().sum().backward()
    assert all(
        torch.equal(own.grad, other.grad) for own, other in zip(model.parameters(), plain.parameters(), strict=True)
    )
    assert torch.equal(model.sums, plain.sums)


def test_many_running_statistics() -> None:
    """Of which the operator that writes them does not say so."""
    model = nn.BatchNorm1d(1 << 15)
    plain, x = copy.deepcopy(model), torch.randn(3, 1 << 15)
    Recomputation().run(model, model.forward, (x,), {}, lambda: None).square().sum().backward()
    plain(x).square().sum().backward()
    assert all(torch.equal(own, other) for own, other in zip(model.buffers(), plain.buffers(), strict=True))


def test_a_large_buffer_that_is_written_into_before_the_backward_pass() -> None:
    model = _Masks()
    result = Recomputation().run(model, model.forward, (torch.randn(4, 16), False), {}, lambda: None)
    model.table.zero_()
    with pytest.raises(lowtide.ExecutionError, match="buffer table of a _Masks was modified"):
        result.sum().backward()


_calls: dict[str, list[int]] = {"seen": []}


class _Deciding(nn.Module):
    """Writes into what it has decided by, as functions of graphs do that turn their masks round."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.layer(x)
        order, mask = hidden.argsort(1), hidden > 0
        hidden = hidden * (order + 0.5) * mask.to(x.dtype)
        order.add_(1).remainder_(16)
        return torch.tanh(hidden * (order + 0.5) + mask.logical_not_()), mask


@pytest.mark.parametrize("where", ["inside", "outside", "in inference mode"])
def test_decisions_that_are_written_into(where: str) -> None:
    torch.manual_seed(0)
    model = _Deciding()
    plain, x = copy.deepcopy(model), torch.randn(4, 16)
    found, mask = Recomputation().run(model, model.forward, (x,), {}, lambda: None)
    expected, other = plain(x)
    if where == "outside":  # by whoever has it
        mask.logical_not_()
    if where == "in inference mode":  # whose tensors do not tell of writes
        with torch.inference_mode():
            decisions: list[Any] = []
            with recording(decisions):
                turned = (x > 0).logical_not_()
            with replaying(decisions):
                again = (x > 0).logical_not_()
            assert torch.equal(again, turned)
    assert torch.equal(found, expected)
    for result in (found, expected):
        result.square().sum().backward()
    assert torch.equal(model.layer.weight.grad, plain.layer.weight.grad)  # type: ignore[arg-type]
    assert torch.equal(mask, other.logical_not() if where == "outside" else other)


class _Drawing(nn.Module):
    """Draws indices, and then a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(x)
        chosen = torch.multinomial(hidden.detach().sigmoid(), 4)
        return nn.functional.dropout(torch.tanh(hidden), 0.5) * chosen.sum(1, keepdim=True)


def test_decisions_that_are_drawn() -> None:
    torch.manual_seed(0)
    model = _Drawing()
    plain, x = copy.deepcopy(model), torch.randn(4, 16)
    for which in (model, plain):
        torch.manual_seed(1)
        result = Recomputation().run(which, which.forward, (x,), {}, lambda: None) if which is model else which(x)
        result.square().sum().backward()
    assert torch.equal(model.layer.weight.grad, plain.layer.weight.grad)  # type: ignore[arg-type]


class _Counting(nn.Module):
    """Scales by how often it ran, which it keeps in a container that is another one from time to time."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _calls["seen"].append(len(_calls["seen"]))
        return torch.tanh(self.layer(x) * len(_calls["seen"]))


def test_what_lies_outside_is_found_where_others_replace_it() -> None:
    """Also in calls after the first, which look no further than what changed."""
    torch.manual_seed(0)
    model, again = _Counting(), Recomputation()
    plain, x = copy.deepcopy(model), torch.randn(4, 16)
    for number in range(3):
        found = {}
        for which in (plain, model):
            _calls["seen"] = [0] * number
            run = which(x) if which is plain else again.run(which, which.forward, (x,), {}, lambda: None)
            run.square().sum().backward()
            found[which] = _calls["seen"]
        assert found[model] == found[plain]
        assert torch.equal(model.layer.weight.grad, plain.layer.weight.grad)  # type: ignore[arg-type]


class _Log:
    """What a caller hands down: a counter, and what was met."""

    def __init__(self) -> None:
        self.calls = 0
        self.met: dict[str, list[torch.Tensor]] = {}


class _Logging(nn.Module):
    """Computes with what it finds in its arguments, and changes that."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, pair: tuple[torch.Tensor, _Log], seen: list[int]) -> torch.Tensor:
        x, log = pair
        x = torch.tanh(self.layer(x) * (1 + log.calls) + len(seen))
        log.calls += 1
        log.met.setdefault("x", []).append(x)
        seen.append(log.calls)
        return torch.tanh(x * len(log.met["x"]))


def test_arguments_are_as_they_were_and_stay_as_they_are() -> None:
    torch.manual_seed(0)
    model = _Logging()
    plain, again, x = copy.deepcopy(model), Recomputation(), torch.randn(4, 16)
    log, seen, other, others = _Log(), [], _Log(), list[int]()
    for _ in range(3):
        found = again.run(model, model.forward, ((x, log), seen), {}, lambda: None)
        expected = plain((x, other), others)
        assert torch.equal(found, expected)
        left = list(log.met["x"])
        (found + log.met["x"][-1]).square().sum().backward()
        (expected + other.met["x"][-1]).square().sum().backward()
        assert torch.equal(model.layer.weight.grad, plain.layer.weight.grad)  # type: ignore[arg-type]
        assert (log.calls, seen) == (other.calls, others)
        assert [*map(id, log.met["x"])] == [*map(id, left)]


class _Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class _Plain:
    def __init__(self) -> None:
        self.count = 0
        self.within = _Slotted()


class _Writing(nn.Module):
    """Scales by what it finds in an attribute, and writes there, before it computes or after."""

    def __init__(self, write: str) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.write = write
        self.number, self.flags, self.seen = 0, {"count": 0}, [0]
        self.queue, self.known = deque([0]), {0}
        self.held = _Plain()
        self.hidden = (nn.Identity(),)
        self.activations = nn.ModuleDict({"one": nn.Tanh()})

    def count(self) -> int:
        held = self.held
        hidden = getattr(self.hidden[0], "count", 0)
        others = (len(self.seen), len(self.queue), len(self.known), len(self.activations))
        return sum((self.number, self.flags["count"], held.count, held.within.count, hidden, *others))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.lin(x).sin() * self.count()
        name, count = self.write, self.count()
        if name == "number":
            self.number += 1
        elif name == "flags":
            self.flags["count"] += 1
        elif name == "seen":
            self.seen.append(1)
        elif name == "queue":
            self.queue.append(1)
        elif name == "known":
            self.known.add(count)
        elif name == "held":
            self.held.count += 1
        elif name == "within":
            self.held.within.count += 1
        elif name == "replaced":
            self.held = _Plain()
            self.held.count = count
        elif name == "hidden":
            self.hidden[0].count = count
        return result.exp() * self.count()


@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize(
    "write", ["", "number", "flags", "seen", "queue", "known", "held", "within", "replaced", "hidden"]
)
def test_attributes_are_as_they_were_and_stay_as_they_are(write: str, between: bool) -> None:
    """In each of several calls, whether they are written by the module or by others before the backward pass."""
    torch.manual_seed(0)
    model = _Writing(write if not between else "")
    plain, writer, x = copy.deepcopy(model), _Writing(write), torch.randn(4, 8)
    again = Recomputation()
    for _ in range(3):
        counts = []
        for own, run in (
            (model, lambda: again.run(model, model.forward, (x,), {}, lambda: None)),
            (plain, lambda: plain(x)),
        ):
            own.zero_grad()
            result = run().sum()
            if between:
                writer.__dict__.update(
                    {name: value for name, value in vars(own).items() if name not in ("write", "training")}
                )
                writer(x)
                own.__dict__.update({name: vars(writer)[name] for name in ("number", "held")})
            result.backward()
            counts.append(own.count())
        assert counts[0] == counts[1]
        assert all(
            torch.equal(one.grad, two.grad) for one, two in zip(model.parameters(), plain.parameters(), strict=True)
        )
    assert counts[0] > 4 or not write


class _Marked(nn.Module):
    """A hook counts calls at a parameter and a buffer, as those for gradients of single samples do, and one of the backward
    pass counts them down."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.BatchNorm1d(8)
        self.inner.register_forward_hook(self._count)
        self.inner.register_full_backward_hook(self._count_down)
        vars(self.inner.weight).update(waiting=0, log=[])
        vars(self.inner.running_mean).update(waiting=0, log=[])

    def marks(self) -> list[dict[str, Any]]:
        return [vars(self.inner.weight), vars(self.inner.running_mean)]

    def _count(self, *_: Any) -> None:
        for marks in self.marks():
            marks["waiting"] += 1
            marks["log"].append("called")

    def _count_down(self, *_: Any) -> None:
        for marks in self.marks():
            marks["waiting"] -= 1
            marks["log"].append("differentiated")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x.sin()).exp()
        return result


def test_attributes_of_parameters_are_as_they_were_and_stay_as_they_are() -> None:
    model, again = _Marked(), Recomputation()
    for number in range(1, 4):
        x = torch.randn(4, 8, requires_grad=True)
        again.run(model, model.forward, (x,), {}, lambda: None).sum().backward()
        assert model.marks() == [{"waiting": 0, "log": ["called", "differentiated"] * number}] * 2
