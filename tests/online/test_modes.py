"""Other contexts inside and around: gradient modes, autocast, function transforms, checkpointing, online itself."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import lowtide
from lowtide.dynamic.operators import Operator
from lowtide.memory import cpu_allocator
from tests.online.scenarios import (
    ROWS,
    TENSOR_BYTES,
    WIDTH,
    Scenario,
    Training,
    assert_same_values,
    chain,
    compare,
    perform,
)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference(mode: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
    def setup() -> Scenario:
        training = Training()
        training.model.eval()

        def scenario() -> Any:
            with mode():
                hidden = [training.data[0]]
                for block in training.blocks:
                    hidden.extend([block(hidden[-1]), hidden[-1] * 2])
                    hidden[-2].mul_(0.5)
                return [tensor.sum().item() for tensor in hidden]

        return scenario

    compare(setup)


def test_inference_between_training_steps() -> None:
    def setup() -> Scenario:
        training = Training()

        def scenario() -> Any:
            losses = []
            for index in range(3):
                losses.append(training.step(index).item())
                training.model.eval()
                with torch.inference_mode():
                    losses.append(training.loss(index).item())
                with torch.no_grad():
                    losses.append(training.loss(index).item())
                training.model.train()
            return losses, training.state()

        return scenario

    compare(setup)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_around(mode: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
    """``lowtide.online`` inside the other mode."""
    expected = [tensor.sum().item() for tensor in chain()]
    with mode(), lowtide.online(8 * TENSOR_BYTES) as session:
        assert [tensor.sum().item() for tensor in chain()] == expected
    assert session.statistics.evictions > 0


def test_autocast() -> None:
    def setup() -> Scenario:
        training = Training()

        def scenario() -> Any:
            losses = []
            for index in range(3):
                training.optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = training.loss(index)
                loss.backward()
                training.optimizer.step()
                losses.append(loss.detach())
            return losses, training.state()

        return scenario

    compare(setup)


def _network() -> tuple[nn.Module, dict[str, torch.Tensor], torch.Tensor]:
    model = nn.Sequential(
        *(layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())), nn.Linear(WIDTH, 1)
    ).requires_grad_(False)
    return model, {name: value.detach() for name, value in model.named_parameters()}, torch.randn(ROWS, WIDTH)


def _squared(model: nn.Module) -> Callable[[dict[str, torch.Tensor], torch.Tensor], torch.Tensor]:
    def loss(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, weights, (x,)).square().mean()

    return loss


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")
@pytest.mark.parametrize("transform", ["grad", "grad of grad", "vmap", "vmap of grad", "jacrev", "jvp"])
def test_function_transforms(transform: str) -> None:
    def setup() -> Scenario:
        model, weights, x = _network()
        loss = _squared(model)

        def scenario() -> Any:
            if transform == "grad":
                return torch.func.grad(loss)(weights, x)
            if transform == "grad of grad":
                inner = torch.func.grad(loss, argnums=1)
                return torch.func.grad(lambda w: inner(w, x).square().sum())(weights)
            if transform == "vmap":
                return torch.func.vmap(loss, in_dims=(None, 0))(weights, x[:, None])
            if transform == "vmap of grad":
                gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x[:64, None])
                return {name: gradient.sum(dim=0) for name, gradient in gradients.items()}
            if transform == "jacrev":
                return torch.func.jacrev(lambda v: model(v).mean(dim=0))(x)
            return torch.func.jvp(lambda v: model(v).sum(), (x,), (torch.ones_like(x),))

        return scenario

    compare(setup, share=70)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_inside(reentrant: bool) -> None:
    def setup() -> Scenario:
        training = Training()

        def scenario() -> Any:
            losses = []
            for index in range(3):
                training.optimizer.zero_grad()
                x = training.data[index].requires_grad_()
                hidden = checkpoint(training.model[:4], x, use_reentrant=reentrant)
                hidden = checkpoint_sequential(training.model[4:8], 2, hidden, use_reentrant=reentrant)
                loss = training.model[8](hidden).square().mean()
                loss.backward()
                training.optimizer.step()
                losses.append(loss.detach())
            return losses, training.state()

        return scenario

    compare(setup, share=80)


def test_saved_tensor_hooks_that_leave_torch() -> None:
    """What a hook packs into NumPy arrays is its own; what it unpacks is as in eager."""

    def setup() -> Scenario:
        training = Training()

        def scenario() -> Any:
            with saved_tensors_hooks(lambda tensor: tensor.numpy(force=True).copy(), torch.from_numpy):
                loss = training.loss(0)
            loss.backward()
            return loss.detach(), training.state()

        return scenario

    compare(setup, share=1000, evicts=False)


def test_hooks_that_read_and_replace() -> None:
    def setup() -> Scenario:
        training = Training()
        norms: list[float] = []

        def scenario() -> Any:
            for index in range(2):
                hidden = training.model[:4](training.data[index])
                hidden.register_hook(lambda gradient: norms.append(gradient.norm().item()))
                hidden.register_hook(lambda gradient: gradient.clone().mul_(0.5))
                training.model[4:](hidden).square().sum().backward()
            return norms, training.state()

        return scenario

    compare(setup)


def test_repeated() -> None:
    """One context entered again and again: the training and the levels after each leaving are eager's."""

    def repeated(context: contextlib.AbstractContextManager[Any]) -> Callable[[], Scenario]:
        def setup() -> Scenario:
            training = Training()

            def scenario() -> Any:
                losses, levels, start = [], [], _level_bytes()
                for index in range(6):
                    with context:
                        losses.append(training.step(index))
                    levels.append(_level_bytes() - start)
                return losses, training.state(), levels

            return scenario

        return setup

    expected = perform(repeated(contextlib.nullcontext()), contextlib.nullcontext())
    session = lowtide.online(expected.peak_bytes // 2)
    actual = perform(repeated(session), contextlib.nullcontext())
    assert_same_values(actual.value, expected.value)
    assert torch.equal(actual.generator, expected.generator)
    assert actual.peak_bytes < expected.peak_bytes
    assert session.statistics.evictions > 0


def _level_bytes() -> int:
    gc.collect()
    counter = cpu_allocator.install()
    return counter.level_bytes if counter else 0


def test_nested() -> None:
    """The inner budget holds inside, the outer one throughout."""
    expected = [tensor.sum().item() for tensor in chain()]
    inner_peaks = []

    def inside() -> None:
        with lowtide.online(6 * TENSOR_BYTES):
            assert [tensor.sum().item() for tensor in chain()] == expected

    def scenario() -> None:
        with lowtide.online(16 * TENSOR_BYTES):
            held = chain()[::4]
            inner_peaks.append(lowtide.measure(inside).peak_bytes)
            assert [tensor.sum().item() for tensor in held] == expected[::4]
            assert [tensor.sum().item() for tensor in chain()] == expected

    assert lowtide.measure(scenario).peak_bytes <= 16 * TENSOR_BYTES
    assert inner_peaks[0] <= 6 * TENSOR_BYTES


def test_tensors_pass_from_one_context_to_another() -> None:
    expected = [tensor.sum().item() for tensor in chain()]
    with lowtide.online(6 * TENSOR_BYTES):
        first = chain()[12]
    with lowtide.online(6 * TENSOR_BYTES):
        rest = [first]
        for index in range(12, 24):
            rest.append(torch.tanh(rest[-1] * 1.25 + index / 8))
        assert [tensor.sum().item() for tensor in rest] == expected[12:]
    assert [tensor.sum().item() for tensor in rest] == expected[12:]


def test_leaving_in_another_order() -> None:
    """A context that is kept open by a generator and closed late disturbs nobody."""

    def produce() -> Any:
        with lowtide.online(6 * TENSOR_BYTES):
            for tensor in chain():
                yield tensor.sum().item()

    expected = [tensor.sum().item() for tensor in chain()]
    producer = produce()
    assert [next(producer) for _ in range(10)] == expected[:10]
    assert [tensor.sum().item() for tensor in chain()] == expected
    assert list(producer) == expected[10:]
    assert [tensor.sum().item() for tensor in chain()] == expected


def test_what_does_not_fit_is_restored_with_little_more() -> None:
    """Evicted gradients that cannot all be rebuilt within the budget come back at the end, without all activations."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            *(module for _ in range(12) for module in (nn.Linear(64, 64), nn.Tanh(), nn.LayerNorm(64)))
        )

    inputs = torch.randn(256, 64)
    plain, model = make(), make()

    def step() -> None:
        with lowtide.online(260_000):
            model(inputs).square().sum().backward()

    eager_peak = lowtide.measure(lambda: plain(inputs).square().sum().backward()).peak_bytes
    measured = lowtide.measure(step)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), model.parameters(), strict=True))
    assert measured.final_bytes == sum(parameter.nbytes for parameter in model.parameters())
    assert 260_000 < measured.peak_bytes < eager_peak / 4


@pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning")
@pytest.mark.parametrize(
    "kind", ["sparse gradient", "nested", "complex", "half", "double", "empty", "lstm", "transformer"]
)
def test_other_kinds_of_tensors(kind: str) -> None:
    def setup() -> Scenario:
        embedding = nn.Embedding(50, WIDTH, sparse=True)
        lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.1)
        transformer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.1, batch_first=True)
        ids, x = torch.arange(ROWS) % 50, torch.randn(8, ROWS // 8, WIDTH)

        def scenario() -> Any:
            if kind == "sparse gradient":
                tensors = [embedding(ids).tanh()]
                for _ in range(LAYERS):
                    tensors.append(tensors[-1].cos())
                tensors[-1].sum().backward()
                gradient, embedding.weight.grad = embedding.weight.grad, None
                return gradient.to_dense()
            if kind == "lstm":
                lstm(x)[0].sum().backward()
                return [parameter.grad for parameter in lstm.parameters()]
            if kind == "transformer":
                transformer(transformer(x)).square().sum().backward()
                return [parameter.grad for parameter in transformer.parameters()]
            if kind == "nested":  # one that is made of memory which was there before, too
                tensors = [embedding(ids) * index for index in range(LAYERS)]
                rows = torch.nested.nested_tensor([tensors[1][:7], tensors[2][:3]]) * 2
                again = torch.nested.as_nested_tensor(x * 3)
                padded = [torch.nested.to_padded_tensor(one * 2, 0.0).sum().item() for one in (rows, again)]
                return [*padded, *(tensor.cos().sum().item() for tensor in tensors)]
            if kind == "complex":
                tensors = [torch.fft.rfft(x)]
                tensors.extend(tensors[0] * index for index in range(LAYERS))
                return [torch.fft.irfft(tensor).sum().item() for tensor in tensors]
            if kind == "empty":
                tensors = [x[:0] + index for index in range(3)] + [x * index for index in range(LAYERS)]
                return [tensor.sum().item() for tensor in tensors]
            dtype = torch.float16 if kind == "half" else torch.float64
            tensors = [x.to(dtype) * index for index in range(LAYERS)]
            return [tensor.float().sum().item() for tensor in tensors]

        return scenario

    fused = kind in ("lstm", "transformer")  # few operators, each with much of the whole
    compare(setup, share=90 if fused else 60, evicts=not fused)


LAYERS = 16


@pytest.mark.filterwarnings("ignore")  # Dynamo's own
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_parts_of_a_program(backend: str) -> None:
    """They run operator by operator inside: Dynamo compiles neither them there nor the engine; and as compiled afterwards."""
    torch.manual_seed(0)
    layers, x = [nn.Linear(WIDTH, WIDTH) for _ in range(6)], torch.randn(ROWS, WIDTH)
    last = nn.Sequential(*layers[3:], nn.Tanh())
    expected = torch.autograd.grad(nn.Sequential(*layers[:3], last)(x).sum(), layers[0].weight)[0]
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    model = nn.Sequential(*layers[:3], torch.compile(last, backend=counter))
    with lowtide.online(6 * TENSOR_BYTES) as session:
        found = torch.autograd.grad(model(x).sum(), layers[0].weight)[0]
        assert "tensor" in repr(model(x)[0, 0])
    assert torch.equal(found, expected)
    assert session.statistics.evictions > 0
    assert counter.frame_count == 0
    model(x).sum().backward()
    assert counter.frame_count == 1
    torch._dynamo.reset()


@pytest.mark.parametrize("function", [F.silu, F.mish, lambda x: F.channel_shuffle(x[None, :, None], 2)])
def test_operators_with_a_decomposition_beside_their_kernels(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Eager takes the kernel, and so must the engine: the two round differently."""
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0), requires_grad=True)
    (expected,) = torch.autograd.grad(function(x).square().sum(), x)
    with lowtide.online("1GiB"):
        (found,) = torch.autograd.grad(function(x).square().sum(), x)
    assert torch.equal(found, expected)


def test_operators_are_read_once_for_all_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A context that is entered for each step does not read the schemas of all operators anew."""
    session, read = lowtide.online(1 << 30), []
    original = Operator.__init__

    def noting(operator: Operator, overload: Any) -> None:
        read.append(overload)
        original(operator, overload)

    monkeypatch.setattr(Operator, "__init__", noting)
    weight = torch.ones(8, 8, requires_grad=True)
    for _ in range(3):
        with session:
            torch.tanh(weight @ weight).sum().backward()
    assert len(read) == len(set(read)) > 0


def test_models_that_are_exported_inside() -> None:
    """What PyTorch traces has no memory: neither its tensors nor those that are made meanwhile are the online mode's."""

    class Places(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) + torch.arange(8, dtype=x.dtype)

    model, x = Places(), torch.ones(2, 8)
    with lowtide.online("8MiB"):
        exported = torch.export.export(model, (x,))
        model(x).sum().backward()
        assert torch.equal(exported.module()(x), model(x))
    assert "arange" in exported.graph_module.code
