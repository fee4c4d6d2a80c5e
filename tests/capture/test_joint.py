"""The joint graph of a function: run on real tensors it gives what eager gives, and the function runs once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.capture import capture
from lowtide.capture.trace import direct, joint, recorder, results
from lowtide.capture.trace.fake import AnsweringFakeMode
from lowtide.capture.trace.fake_inputs import fakes_of
from lowtide.capture.trace.joint import export_joint
from lowtide.program.roles import Gradient, Input, Output, Tangent, Written

Function = Callable[..., Sequence[torch.Tensor]]


def _several(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Sequence[torch.Tensor]:
    y = (x @ w).tanh()
    return y * 2, y.sum(0), b + 1


def _in_place(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Sequence[torch.Tensor]:
    y = x @ w
    y[:, 1].mul_(3)
    return (y.t().relu_(),)


def _writing(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Sequence[torch.Tensor]:
    b.mul_(0.5).add_(1)
    return (x @ w * b).exp(), b


def _clipped(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Sequence[torch.Tensor]:
    with torch.no_grad():
        w.clamp_(-0.5, 0.5)
    return ((x @ w).square(),)


def _expanded(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Sequence[torch.Tensor]:
    return (x @ w).sum(1, keepdim=True).expand(3, 4), x


def _complex(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Sequence[torch.Tensor]:
    return (torch.complex(x @ w, x).conj(),)


@pytest.mark.parametrize("function", [_several, _in_place, _writing, _clipped, _expanded, _complex])
def test_it_computes_what_eager_computes(function: Function) -> None:
    torch.manual_seed(0)
    given = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True), torch.randn(4)
    runs = []

    def counting(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        runs.append(tensors)
        return function(*tensors)

    mode = AnsweringFakeMode()
    module = export_joint(counting, fakes_of(mode, (), given), mode)
    assert len(runs) == 1
    inputs = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in given]
    outputs = function(*inputs)
    placeholders = module.graph.find_nodes(op="placeholder")
    roles = [node.meta["role"] for node in placeholders]
    assert roles[:3] == [Input(0), Input(1), Input(2)]
    differentiated = [role.output for role in roles[3:] if isinstance(role, Tangent)]
    assert differentiated == [i for i, one in enumerate(outputs) if one.grad_fn is not None]
    tangents = [torch.randn_like(outputs[i]) for i in differentiated]
    # Numbers that are read with their conjugates arrive so.
    tangents = [
        t.conj_physical().conj() if outputs[i].is_conj() else t for i, t in zip(differentiated, tangents, strict=True)
    ]
    expected = torch.autograd.grad([outputs[i] for i in differentiated], inputs[:2], tangents, allow_unused=True)
    found = torch.fx.Interpreter(module).run(
        *(tensor.detach().clone() for tensor in given), *tangents, enable_io_processing=False
    )
    results = dict(zip(module.graph.output_node().meta["role"], found, strict=True))
    for number, output in enumerate(outputs):
        assert torch.equal(results[Output(number)], output)
    for number, gradient in enumerate(expected):
        mine = results[Gradient(number)]
        assert (mine is None) == (gradient is None) and (gradient is None or torch.equal(mine, gradient))
    written = {role.input for role in results if isinstance(role, Written)}
    assert written == {i for i, (now, then) in enumerate(zip(inputs, given, strict=True)) if not torch.equal(now, then)}
    assert all(torch.equal(results[Written(i)], inputs[i]) for i in written)


class _Many(nn.Module):
    """Operators with several results, lists of arguments, constants, random numbers, statistics, and numbers that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.attention = nn.MultiheadAttention(36, 4, dropout=0.1, batch_first=True)
        self.register_buffer("table", torch.arange(36.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = nn.functional.max_pool2d(self.norm(self.conv(x)).relu_(), 2).flatten(2)
        heads = h.unflatten(2, (4, 9)).transpose(1, 2)
        h = h + nn.functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)
        shifted = torch.zeros_like(h)
        shifted[:, 1:] = h[:, :-1]
        h = (h + shifted) * (1 + self.table / torch.tensor(36.0).item())
        h, _ = self.attention(h, h, h)
        values, places = h.topk(5)
        first, *others = torch.split(torch.cat([values, values.cumsum(1)], 1), 3, dim=1)
        h = torch.stack([first.std(), *(other.square().mean() for other in others)])
        return h.max(0).values + h[places.flatten()[:1] * 0].sum() * torch.tensor([1.0, 2.0])[1]


def test_methods_of_modules_are_replaced_only_where_the_function_traces_one() -> None:
    methods, graphs = [], []
    layers = nn.Sequential(nn.Linear(2, 2), nn.ReLU())

    def tracing(x: torch.Tensor) -> Sequence[torch.Tensor]:
        methods.append((nn.Module.__call__, nn.Module.__getattr__))
        graphs.append(torch.fx.symbolic_trace(layers).graph)
        return (x.sin(),)

    mode = AnsweringFakeMode()
    export_joint(tracing, fakes_of(mode, (), [torch.randn(2, requires_grad=True)]), mode)
    assert methods == [(nn.Module.__call__, nn.Module.__getattr__)]
    assert [node.op for node in graphs[0].nodes] == ["placeholder", "call_module", "call_module", "output"]


def test_what_is_noted_in_short_is_what_the_tracer_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    def program() -> Any:
        torch.manual_seed(0)
        return capture(_Many(), (torch.randn(2, 3, 14, 14),)).program

    first, short = program(), program()  # by what the first has kept of fake kernels
    monkeypatch.setattr(direct, "_kind", lambda _: None)
    in_part = program()
    monkeypatch.setattr(results, "key_of", lambda *_: None)
    monkeypatch.setattr(recorder, "is_simple", lambda _: False)
    full = program()
    for other in (first, in_part, full):
        _assert_same(short, other)


def _assert_same(short: Any, full: Any) -> None:
    assert short.graph == full.graph
    assert repr(short.calls) == repr(full.calls)
    assert short.metas == full.metas and short.inputs == full.inputs and short.results == full.results
    assert short.gradients == full.gradients and short.tangents == full.tangents


class _Warming(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.step = nn.Linear(4, 4), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        y = self.linear(x)
        return (y * 2 if self.step < 5 else y).sum()


def test_a_graph_is_swept_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what says what may go; the tracer's own way of it looks at every operator and leaves it."""
    swept = []
    sweep = torch.fx.Graph.eliminate_dead_code

    def counting(graph: torch.fx.Graph, *rules: Any) -> bool:
        swept.append(rules)
        return sweep(graph, *rules)

    monkeypatch.setattr(torch.fx.Graph, "eliminate_dead_code", counting)
    x = torch.randn(3, 4, requires_grad=True)
    with torch.enable_grad():
        mode = AnsweringFakeMode()
        module = export_joint(lambda x: (x.exp(), x.sin() * 0)[:1], fakes_of(mode, (), (x,)), mode)
    assert swept == [()]
    assert not module.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)


class _Asking(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        assert not torch.overrides._len_torch_function_stack()
        return gradient * 2


def test_no_mode_looks_at_calls_of_a_backward_pass_that_has_no_numbers() -> None:
    """Our own would come to one with each question that the tracer asks a tensor."""

    class Custom(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return _Asking.apply(super().forward(x))  # type: ignore[no-any-return]

    capture(Custom(4, 4), (torch.randn(2, 4),))


def test_a_number_that_changes_is_learned_of_before_the_joint_graph_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[Any] = []
    backward = joint._Joint._backward

    def counting(self: Any, *args: Any) -> Any:
        traced.append(args)
        return backward(self, *args)

    monkeypatch.setattr(joint._Joint, "_backward", counting)
    assert capture(_Warming(), (torch.randn(3, 4),)).program.graph.ops
    assert len(traced) == 1


class _Doing(nn.Module):
    def __init__(self, what: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.what = what
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.ones(2, 4))
        self.register_buffer("row", self.table[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.what(self, self.linear(x)).sum()


def _turned(model: Any, y: torch.Tensor) -> torch.Tensor:
    return y * model.table.t_().sum()


def _overlapping(model: Any, y: torch.Tensor) -> torch.Tensor:
    model.row.add_(1)
    return y * model.table.sum(0)


def _without_gradients(model: Any, y: torch.Tensor) -> torch.Tensor:
    torch.set_grad_enabled(False)
    return y * 2


def _casting(model: Any, y: torch.Tensor) -> torch.Tensor:
    torch.set_autocast_enabled("cpu", True)
    return y * 2


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (_turned, r"another shape or other memory in place \(t_\(\)"),
        (_overlapping, "writes into memory that several buffers or arguments share"),
        (_without_gradients, "leaves autocast or the gradient mode in another state"),
        (_casting, "leaves autocast or the gradient mode in another state"),
    ],
)
def test_what_no_program_does(what: Callable[..., Any], message: str) -> None:
    model = _Doing(what)
    try:
        with pytest.raises(lowtide.CaptureError, match=message):
            capture(model, (torch.randn(3, 4),))
        assert torch.is_grad_enabled()
    finally:
        torch.set_autocast_enabled("cpu", False)


def test_a_write_beside_another_buffer() -> None:
    def beside(model: Any, y: torch.Tensor) -> torch.Tensor:
        model.row.add_(1)
        return y * model.other

    model = _Doing(beside)
    model.other = nn.Buffer(model.table[0])
    del model.table
    assert capture(model, (torch.randn(3, 4),)).program.graph.ops


class _Recurring(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            for _ in range(3):
                x = self.linear(x).float()
        return x.square().mean()


def test_views_of_a_cast_that_serves_several_uses_are_its_memory() -> None:
    graph = capture(_Recurring(), (torch.randn(4, 16),)).program.graph
    views = [op for op in graph.ops[: graph.forward_ops] if op.name.split("_")[0] == "t"]
    assert len(views) == 3
    assert len({graph.values[value].storage for op in views for value in (*op.inputs, *op.outputs)}) == 1
