"""Whatever reads a held tensor that was evicted gets its values: printing, indexing, NumPy, pickling, copying."""

from __future__ import annotations

import copy
import ctypes
import gc
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import lowtide
from tests.online.scenarios import TENSOR_BYTES, WIDTH, Scenario, Training, chain, compare

Reader = Callable[[torch.Tensor], Any]


def _saved(tensor: torch.Tensor) -> bytes:
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.getvalue()


def _loaded(tensor: torch.Tensor) -> float:
    return torch.load(io.BytesIO(_saved({"tensor": tensor})))["tensor"].sum().item()  # type: ignore[no-any-return,arg-type]


def _raw(tensor: torch.Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


READERS: dict[str, Reader] = {
    "item": lambda tensor: tensor[3, 5].item(),
    "float": lambda tensor: float(tensor[-1, -1]),
    "truth": lambda tensor: bool((tensor > 2).any()),
    "print": lambda tensor: f"{tensor} {tensor[0, 0]:.3f} {tensor!r} {tensor[:, :2]}",
    "tolist": lambda tensor: tensor.tolist(),
    "tolist of a view": lambda tensor: tensor.t()[3:5].tolist(),
    "slice": lambda tensor: tensor[2:4, ::7].tolist(),
    "mask": lambda tensor: tensor[tensor > 0.5].tolist(),
    "iteration": lambda tensor: [row[0].item() for row in tensor],
    "data": lambda tensor: tensor.data.tolist(),
    "equal": lambda tensor: torch.equal(tensor, tensor.clone()),
}
# The memory itself is handed out: it stays where it is for as long as the tensor lives.
EXPORTERS: dict[str, Reader] = {
    "numpy": lambda tensor: tensor.numpy().tobytes(),
    "asarray": lambda tensor: np.asarray(tensor).tobytes(),
    "numpy of a view": lambda tensor: tensor.t()[1:].numpy().tobytes(),
    "dlpack": lambda tensor: np.from_dlpack(tensor).tobytes(),
    "address": _raw,
    "storage": lambda tensor: [tensor.untyped_storage()[at] for at in range(40, 60)],
    "storage of a view": lambda tensor: [tensor[1:].storage()[at] for at in range(40, 60)],
    "detached": lambda tensor: tensor.detach().numpy().tobytes(),
    "save": _saved,
    "save and load": _loaded,
    "pickle": lambda tensor: pickle.loads(pickle.dumps(tensor)).sum().item(),
    "deepcopy": lambda tensor: copy.deepcopy(tensor).tolist(),
    "copy": lambda tensor: copy.copy(tensor).tolist(),
    "frombuffer": lambda tensor: torch.frombuffer(tensor.numpy(), dtype=torch.float32).sum().item(),
    "as_tensor": lambda tensor: torch.as_tensor(tensor.numpy()).mul(2).sum().item(),
}


def _reading(reader: Reader, every: int) -> Callable[[], Scenario]:
    """A scenario that reads some of the tensors of a chain, forwards and backwards."""

    def setup() -> Scenario:
        def scenario() -> Any:
            tensors = chain()
            chosen = tensors[::every]
            return [reader(tensor) for tensor in [*chosen, *reversed(chosen)]]

        return scenario

    return setup


@pytest.mark.parametrize("name", READERS)
def test_reading_evicted_tensors(name: str) -> None:
    """More than half of what is read was evicted."""
    statistics = compare(_reading(READERS[name], every=1))
    assert statistics.rematerializations > 0


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("name", EXPORTERS)
def test_handing_out_the_memory_of_evicted_tensors(name: str) -> None:
    statistics = compare(_reading(EXPORTERS[name], every=6))
    assert statistics.rematerializations > 0


def test_reading_evicted_gradients() -> None:
    def setup() -> Scenario:
        training = Training()

        def scenario() -> Any:
            training.steps(2)
            hidden = training.model[:3](training.data[0])
            hidden.retain_grad()
            training.model[3:](hidden).square().sum().backward()
            return hidden.grad.tolist(), repr(hidden), hidden.detach().numpy().tobytes()

        return scenario

    compare(setup)


def test_everything_that_is_held_when_the_context_is_left() -> None:
    """Ordinary tensors then: right, writable, each with a storage of its own, views sharing theirs."""

    def setup() -> Scenario:
        def scenario() -> Any:
            tensors = chain()
            return tensors, [tensor[1:3] for tensor in tensors]

        return scenario

    compare(setup, holds=True)
    with lowtide.online(8 * TENSOR_BYTES) as session:
        tensors, views = setup()()
    assert session.statistics.evictions > 0
    for tensor, view in zip(tensors, views, strict=True):
        assert view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        tensor.zero_()
        assert not view.any()
    assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors)


def test_backward_after_leaving() -> None:
    def setup() -> Scenario:
        training = Training()
        kept: list[torch.Tensor] = []

        def scenario() -> Any:
            kept.append(training.loss(0))
            return kept[0]

        return scenario

    compare(setup, holds=True)
    expected, actual = Training(), Training()
    actual.model.load_state_dict(expected.model.state_dict())
    actual.data = expected.data
    losses = []
    for training in (expected, actual):
        torch.manual_seed(5)
        if training is expected:
            losses.append(training.loss(0))
        else:
            with lowtide.online(20 * TENSOR_BYTES) as session:
                losses.append(training.loss(0))
            assert session.statistics.evictions > 0
        losses[-1].backward()
    assert torch.equal(*losses)
    for name, tensor in expected.state().items():
        assert torch.equal(tensor, actual.state()[name]), name


def test_state_dict_inside() -> None:
    """A checkpoint of model and optimizer, saved and loaded in the middle of the training."""

    def setup() -> Scenario:
        training = Training()

        def scenario() -> Any:
            training.steps(2)
            file = io.BytesIO()
            torch.save((training.model.state_dict(), training.optimizer.state_dict()), file)
            training.steps(2)
            file.seek(0)
            model, optimizer = torch.load(file)
            training.model.load_state_dict(model)
            training.optimizer.load_state_dict(optimizer)
            del model, optimizer
            return training.steps(2), training.state()

        return scenario

    compare(setup)


def test_deepcopy_of_a_model_inside() -> None:
    def setup() -> Scenario:
        training = Training()

        def scenario() -> Any:
            training.steps(2)
            twin = copy.deepcopy(training.model)
            training.steps(2)
            return twin(training.data[0]).sum().item(), training.state()

        return scenario

    compare(setup)


def test_arrays_that_share_memory_with_a_tensor() -> None:
    """What NumPy writes is seen by the tensor, and results made before are what they were.

    Results that were computed from such memory cannot be computed again; what comes after them can.
    """

    def setup() -> Scenario:
        def results(source: torch.Tensor) -> list[torch.Tensor]:
            first = [source * index for index in range(6)]
            return [*first, *(tensor * factor for tensor in first for factor in (2, 3, 4))]

        def scenario() -> Any:
            array = np.ones((256, WIDTH), dtype=np.float32)
            shared = torch.from_numpy(array)
            tensors = results(shared)
            array[:] = 7
            tensors.extend(results(shared))
            own = torch.zeros(256, WIDTH) + 1
            view = own.numpy()
            tensors.extend(results(own))
            view[:] = 5
            tensors.extend(results(own))
            return [tensor.sum().item() for tensor in (*tensors, own)]

        return scenario

    compare(setup, share=200, evicts=False)


def test_a_tensor_that_was_read_can_be_released() -> None:
    """Reading through NumPy keeps the array's memory, and no more, for as long as the array lives."""

    def setup() -> Scenario:
        def scenario() -> Any:
            arrays = [tensor.numpy() for tensor in chain()[:6]]
            sums = [float(array.sum()) for array in arrays]
            del arrays
            gc.collect()
            return sums, [tensor.sum().item() for tensor in chain()]

        return scenario

    compare(setup, share=50)


def test_writes_through_an_array_are_kept() -> None:
    """Whatever was computed from the tensor, before or after the array was made, is what it was when it was computed."""

    def setup() -> Scenario:
        def scenario() -> Any:
            own = torch.linspace(0, 1, 256 * WIDTH).view(256, WIDTH) * 2
            before = [own * index for index in range(4)]
            others = [tensor.sum().item() for tensor in chain()]
            array = own.numpy()
            between = [own + index for index in range(4)]
            array[:] = 5
            del array
            after = [own - index for index in range(4)]
            for _ in range(3):
                others.extend(tensor.sum().item() for tensor in chain())
            return others, [tensor.sum().item() for tensor in (own, *before, *between, *after)]

        return scenario

    compare(setup, share=75)


def test_what_is_printed_stays_while_it_is() -> None:
    """Where what printing takes is more than there is room for, that is an error of the allocator, and no read of what went."""
    base = torch.linspace(0, 1, 900)
    expected = [str(base * factor) for factor in (1.5, 2.5)]
    for budget_bytes in range(8 << 10, 40 << 10, 2 << 10):
        with lowtide.online(budget_bytes, planning="never"):
            try:
                found = [str(base * factor) for factor in (1.5, 2.5)]
            except RuntimeError:
                continue
            assert found == expected
    assert found == expected


def _launched(tensor: torch.Tensor, value: float) -> None:
    """A kernel that gets an address, and writes there."""
    memory = (ctypes.c_float * tensor.numel()).from_address(tensor.data_ptr())
    np.frombuffer(memory, dtype=np.float32)[:] = value


@pytest.mark.parametrize("again", [False, True])
def test_what_a_kernel_writes_that_gets_an_address(again: bool) -> None:
    """Into memory that was not initialized, which is dropped then, or written another time."""

    def setup() -> Scenario:
        def scenario() -> Any:
            own = torch.empty(256, WIDTH)
            _launched(own, 3)
            results = [own * index for index in range(4)]
            if again:
                _launched(own, 5)
            del own
            others = [tensor.sum().item() for _ in range(3) for tensor in chain()]
            return others, [tensor.sum().item() for tensor in results]

        return scenario

    compare(setup, share=75)


def test_what_a_dead_array_left_can_be_evicted() -> None:
    """Twenty results of a tensor that NumPy has read, in room for ten."""

    def setup() -> Scenario:
        def scenario() -> Any:
            own = torch.linspace(0, 1, 256 * WIDTH).view(256, WIDTH) * 2
            total = float(own.numpy().sum())
            results = [own * index for index in range(20)]
            return total, [tensor.sum().item() for tensor in results]

        return scenario

    compare(setup, share=50)
