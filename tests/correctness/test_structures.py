"""Row: dict, data class, tuple, ``ModelOutput``, nested outputs; keyword arguments; a single tensor stays a tensor."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import lowtide
from tests.support.networks import generator, perceptron, rows
from tests.support.training import MINIMUM, compare_training, make, prepared

Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Result:
    hidden: torch.Tensor
    note: str
    extra: torch.Tensor | None = None


@dataclass(frozen=True)
class FrozenResult:
    hidden: torch.Tensor
    scores: tuple[torch.Tensor, torch.Tensor]


class PlainResult:
    """Not registered with anything."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden
        self.items = [hidden.detach() + 1]


def _model_output(y: torch.Tensor) -> Any:
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(last_hidden_state=y, hidden_states=(y * 2, y.tanh()))


_SHAPERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda y: y,
    "tuple of one": lambda y: (y,),
    "list": lambda y: [y, y.sigmoid()],
    "dict": lambda y: {"y": y, "z": y.exp()},
    "ordered dict": lambda y: OrderedDict(z=y.exp(), y=y),
    "named tuple": lambda y: Pair(y, y.cos()),
    "data class": lambda y: Result(y, "a note"),
    "frozen data class": lambda y: FrozenResult(y, (y.sin(), y.cos())),
    "plain object": PlainResult,
    "model output": _model_output,
    "nested": lambda y: {"a": [y, (y.sin(), None, 3)], "b": Result(y.cos(), "x", y.abs()), "c": "text"},
    "integers and no gradient": lambda y: (y, y.argmax(-1), y.detach().mean(), torch.arange(3), y > 0),
    "the same twice": lambda y: (y, y, {"again": y}),
    "none and numbers": lambda y: (None, y, 1.5, True),
}


class _Shaped(nn.Module):
    def __init__(self, shaper: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.body = perceptron(4)
        self.shaper = shaper

    def forward(self, x: torch.Tensor) -> Any:
        return self.shaper(self.body(x))


@pytest.mark.parametrize("name", _SHAPERS)
def test_output_structure(name: str) -> None:
    compare_training(
        lambda: _Shaped(_SHAPERS[name]), rows(), budgets=("70%", MINIMUM) if name == "nested" else ("65%",)
    )


def test_the_same_tensor_stays_one_object() -> None:
    model = prepared(lambda: _Shaped(_SHAPERS["the same twice"]), rows(), "60%")
    first, second, nested = model(*rows()(0)[0])
    assert first is second is nested["again"]


class _Names(dict[str, Any]):
    """Read and written by attributes."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__  # type: ignore[assignment]


class _Both(OrderedDict[str, Any]):
    """What is in it are its attributes, too."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        super().__setattr__(name, value)

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        super().__setattr__(name, value)


class _Itself(dict[str, Any]):
    """Has itself for its attributes."""

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        self.__dict__ = self


class _Defaults(defaultdict[str, Any]):
    pass


class _Row(list[Any]):
    """Has a length of its own, and a note."""

    note: Any = None

    def __len__(self) -> int:
        return super().__len__() - 1


class _Several(tuple[Any, ...]):
    note: Any = None


def _noted(kind: Any, /, **values: Any) -> Any:
    made = kind(values.values())
    made.note = values["x"]
    return made


_OWN: dict[str, Callable[..., Any]] = {
    "names": _Names,
    "both": _Both,
    "itself": _Itself,
    "defaults": lambda **values: _Defaults(float, values),
    "row": lambda **values: _noted(_Row, **values),
    "several": lambda **values: _noted(_Several, **values),
}


class _InOwn(nn.Module):
    """Takes and returns a container of a class of its own, in another one."""

    def __init__(self, make: Callable[..., Any]) -> None:
        super().__init__()
        self.body, self.make = perceptron(4), make

    def forward(self, given: Any) -> Any:
        (given,) = given
        x, scale = (given["x"], given["scale"]) if isinstance(given, dict) else given
        return [self.make(x=self.body(x * scale), given=x, kind="text")]


@pytest.mark.parametrize("name", _OWN)
def test_containers_of_classes_of_their_own(name: str) -> None:
    """What is in them are inputs and results as in Python's own; their attributes are, too."""
    plain, model = (make(lambda: _InOwn(_OWN[name])) for _ in range(2))
    for step in range(4):
        x = rows()(step)[0][0]
        found = []
        for each in (plain, model):
            if each is model and step == 0:
                lowtide.rematerialize(model, ([_OWN[name](x=x, scale=2.0)],), budget="70%", on_capture_error="error")
            given = [_OWN[name](x=x, scale=2.0)]
            (result,) = each(given)
            y, back, kind = result.values() if isinstance(result, dict) else iter(result)
            assert not isinstance(result, _Itself) or result.x is y
            y.square().mean().backward()
            assert back is x and kind == "text" and type(y) is torch.Tensor
            own = {key: value.tolist() for key, value in vars(result).items() if isinstance(value, torch.Tensor)}
            extra = result["other"] if isinstance(result, _Defaults) else len(result)
            found.append((type(result), y.tolist(), own, extra, *(p.grad.tolist() for p in each.parameters())))
        assert found[0] == found[1]
    assert len(lowtide.plans(model)) == 1


class _Echo(nn.Module):
    """Returns what it was given and what it holds beside its own result."""

    def __init__(self) -> None:
        super().__init__()
        self.network = perceptron(2)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor, options: Any) -> dict[str, Any]:
        self.count += 1
        own = {"weight": self.network[0].weight, "count": self.count}
        return {"y": self.network(x), "x": x, "options": [options, (options, x)], **own}


@pytest.mark.parametrize("requires_grad", [False, True])
def test_what_was_given_comes_back(requires_grad: bool) -> None:
    """Arguments, parameters and buffers among the results are the very same objects, and gradients reach them there."""
    plain, model = _Echo(), _Echo()
    model.load_state_dict(plain.state_dict())
    inputs = [torch.randn(64, 32, requires_grad=requires_grad) for _ in range(3)]
    lowtide.rematerialize(model, (inputs[0], object()), budget="100%", planner="greedy")
    for x in inputs:
        options = object()
        found: list[Any] = []
        for echo in (model, plain):
            echo.zero_grad()
            x.grad = None
            result = echo(x, options)
            assert result["x"] is x
            assert result["options"][0] is result["options"][1][0] is options
            assert result["options"][1][1] is x
            assert result["weight"] is echo.network[0].weight
            assert result["count"] is echo.count
            (result["y"].square().mean() + (result["weight"] ** 3).sum() + (result["x"] ** 2).sum()).backward()
            found.append([parameter.grad for parameter in echo.parameters()] + [x.grad] * requires_grad)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))
        assert torch.equal(model.count, plain.count)


class _Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = perceptron(4)

    def forward(
        self, x: torch.Tensor, *rest: torch.Tensor, scale: float = 1.0, batch: dict[str, Any] | None = None, **more: Any
    ) -> dict[str, torch.Tensor]:
        y = self.body(x) * scale
        for tensor in rest:
            y = y + tensor
        if batch is not None:
            y = y * batch["weights"][0] + batch["options"].shift
        return {"y": y + more.get("bias", 0), **({"mask": more["mask"] * 2} if "mask" in more else {})}


@dataclass
class Options:
    shift: torch.Tensor
    name: str = "options"


def _keyword_inputs(iteration: int) -> Any:
    source = generator(iteration)
    x, more, weights, shift = (torch.randn(256, 32, generator=source) for _ in range(4))
    batch = {"weights": [weights], "options": Options(shift[0])}
    kwargs = {"scale": 0.5, "batch": batch, "bias": 2.0, "mask": torch.ones(3, dtype=torch.bool)}
    return (x, more, more), kwargs


def test_keyword_and_nested_arguments() -> None:
    compare_training(_Keywords, _keyword_inputs, budgets=("70%", MINIMUM), quick=0)


def test_defaults_and_none() -> None:
    def inputs(iteration: int) -> Any:
        return (), {"x": rows()(iteration)[0][0], "batch": None}

    compare_training(_Keywords, inputs, budgets=("60%",))


class _TensorOf(nn.Module):
    """Makes a tensor of single ones, as positions for rows of several lengths are made, and keeps some."""

    def __init__(self, kind: torch.dtype | None, keeps: bool) -> None:
        super().__init__()
        self.keeps = keeps
        self.embedding, self.layer, self.kind = nn.Embedding(64, 16), nn.Linear(16, 16), kind
        self.offsets: torch.Tensor | None = None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        numbers = torch.tensor([row.max() + 1 - len(row) for row in ids], dtype=self.kind, device=ids.device)
        if self.keeps:
            self.offsets = numbers
        means = torch.tensor([row.mean() for row in self.embedding(ids).detach()])
        assert not means.requires_grad and means.dtype is torch.float32
        return (self.layer(self.embedding(ids)) * (numbers * means)[:, None, None]).square().sum()


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("kind", [None, torch.float64])
def test_a_tensor_of_single_tensors(kind: torch.dtype | None, keeps: bool) -> None:
    """Its numbers stay those of each call."""

    def ids(iteration: int) -> Any:
        return (torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(iteration)),), {}

    compare_training(lambda: _TensorOf(kind, keeps), ids, budgets=("100%",), unmet_bytes=32 * keeps)  # the last one
    model, plain = prepared(lambda: _TensorOf(kind, keeps), ids, "100%"), make(lambda: _TensorOf(kind, keeps))
    for iteration in range(3):
        for each in (model, plain):
            each(*ids(iteration)[0]).backward()
        assert not keeps or torch.equal(model.offsets, plain.offsets)
    assert len(lowtide.plans(model)) == 1


@pytest.mark.parametrize(
    "made",
    [
        lambda a, b: torch.tensor([[a, 2], [b, 3.5]]),
        lambda a, b: torch.tensor(((a, 2), (b, True)), dtype=torch.float64),
        lambda a, b: torch.as_tensor([a + 1, b]),
        lambda a, b: a.double().new_tensor([b, 2]),
        lambda a, b: torch.tensor([a > 3, True, b < 2]),
        lambda a, b: torch.tensor([[a], [b.float()]], requires_grad=True),
    ],
)
def test_a_tensor_of_lists_with_single_tensors(made: Any) -> None:
    """It has the type that PyTorch makes of all of them."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            numbers = made(ids[0], ids[1])
            return (self.layer(x) * numbers.sum()).square().sum(), numbers.detach()

    def inputs(iteration: int) -> Any:
        generator = torch.Generator().manual_seed(iteration)
        return (torch.randn(3, 4, generator=generator), torch.randint(0, 9, (2,), generator=generator)), {}

    compare_training(Model, inputs, budgets=("100%",), loss=lambda outputs: outputs[0])


def _written(y: torch.Tensor, rows: Any, columns: Any) -> torch.Tensor:
    written = y * 2
    written[rows, columns] = 0.5
    return written


@pytest.mark.parametrize(
    "chosen",
    [
        lambda y, rows, columns: y[rows, columns],
        lambda y, rows, columns: y[[*rows], 1:],
        lambda y, rows, columns: y[..., [columns[0], 1]],
        lambda y, rows, columns: y[[row > 2 for row in (*rows, *rows[:2])], 0],
        _written,
    ],
    ids=["two", "beside a slice", "with a number", "booleans", "written"],
)
def test_lists_of_single_tensors_in_an_index(chosen: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
            return chosen(self.layer(x), *zip(*places, strict=True)).square().sum()  # type: ignore[no-any-return]

    def inputs(iteration: int) -> Any:
        generator = torch.Generator().manual_seed(iteration)
        return (torch.randn(5, 4, generator=generator), torch.randint(0, 4, (3, 2), generator=generator)), {}

    compare_training(Model, inputs, budgets=("100%",))


class _KeepsAndReads(nn.Module):
    """Keeps a tensor, and reads what is known of its arguments as arrays, texts and lengths of a packed sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.kept = nn.GRU(4, 4, batch_first=True), None

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        y = pad_packed_sequence(self.recurrent(packed)[0], batch_first=True)[0]
        y = y * int(lengths.numpy().max()) * len(str(lengths))
        self.kept = y.mean()
        return y.square().sum()


def test_values_that_are_read_where_tensors_are_kept() -> None:
    def inputs(iteration: int) -> Any:
        return (torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(iteration)), torch.tensor([3, 5])), {}

    compare_training(_KeepsAndReads, inputs, budgets=("100%",), unmet_bytes=4)  # the last one
