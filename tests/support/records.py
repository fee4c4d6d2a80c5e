"""What a training iteration leaves behind, and its comparison with another run to the bit.

A ``Record`` holds copies of everything a user can see after an iteration: the output (type, structure, values, layouts),
every parameter's and every input's gradient (``None`` where there is none), every parameter, every buffer and the
generator's state. Nothing in this file knows about rematerialization.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

LEARNING_RATE = 0.01
SEED = 20

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
Step = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]
Loss = Callable[[Any], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Record:
    """What one iteration left behind, copied."""

    structure: Any
    outputs: tuple[torch.Tensor, ...]
    layouts: tuple[Any, ...]
    gradients: dict[str, torch.Tensor | None]
    input_gradients: tuple[torch.Tensor | None, ...]
    state: dict[str, torch.Tensor]
    generator: torch.Tensor


def scalar_loss(output: Any) -> torch.Tensor:
    """The model's own loss where it returns a scalar or has one; otherwise the sum of squares of its outputs."""
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss
    if isinstance(output, torch.Tensor) and output.numel() == 1:
        return output
    parts = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
    return torch.stack([(part.abs() if part.is_complex() else part.float()).square().sum() for part in parts]).sum()


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """All tensors in nested containers, data classes and plain objects, in a fixed order."""
    found: list[torch.Tensor] = []
    _walk(tree, found, 0)
    return found


def _walk(node: Any, found: list[torch.Tensor], depth: int) -> Any:
    """Append the tensors below ``node`` to ``found``; return its structure: types, keys and plain values."""
    if isinstance(node, torch.Tensor):
        found.append(node)
        return "tensor"
    if isinstance(node, (list, tuple)):
        return type(node), [_walk(child, found, depth + 1) for child in node]
    if isinstance(node, dict):
        return type(node), [(key, _walk(child, found, depth + 1)) for key, child in node.items()]
    if depth < 6 and hasattr(node, "__dict__") and not isinstance(node, (type, nn.Module)):
        return type(node), _walk(vars(node), found, depth + 1)
    return repr(node) if isinstance(node, (int, float, str, bool, type(None))) else type(node)


def training_step(loss: Loss = scalar_loss) -> Step:
    """The ordinary step: forward, loss, backward. Returns the model's output."""

    def step(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = model(*args, **kwargs)
        loss(output).backward()
        return output

    return step


def run_training(model: nn.Module, make_inputs: Callable[[int], Inputs], step: Step, iterations: int) -> list[Record]:
    """Train ``model`` for ``iterations`` SGD steps and record each of them."""
    torch.manual_seed(SEED)
    records = []
    for iteration in range(iterations):
        args, kwargs = copy_inputs(make_inputs(iteration))
        model.zero_grad(set_to_none=True)
        output = step(model, args, kwargs)
        records.append(_record(model, output, args, kwargs))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= LEARNING_RATE * parameter.grad
    return records


def _record(model: nn.Module, output: Any, args: Any, kwargs: Any) -> Record:
    tensors: list[torch.Tensor] = []
    structure = _walk(output, tensors, 0)
    gradients = {name: _copied(p.grad) for name, p in model.named_parameters(remove_duplicate=False)}
    state = {name: tensor.detach().clone() for name, tensor in _state(model)}
    return Record(
        structure=structure,
        outputs=tuple(tensor.detach().clone() for tensor in tensors),
        layouts=tuple((t.dtype, t.shape, t.stride(), t.requires_grad, t.is_leaf) for t in tensors),
        gradients=gradients,
        input_gradients=tuple(_copied(t.grad) for t in tensors_of((args, kwargs)) if t.is_leaf),
        state=state,
        generator=torch.get_rng_state(),
    )


def _state(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _copied(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def copy_inputs(inputs: Inputs) -> Inputs:
    """Fresh tensors with the same values, layouts and requires_grad, so that no run can disturb another."""

    def fresh(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        made = torch.empty_like(leaf).copy_(leaf.detach()) if leaf.is_contiguous() else copy.deepcopy(leaf.detach())
        return made.requires_grad_(leaf.requires_grad)

    args, kwargs = inputs
    return pytree.tree_map(fresh, args), pytree.tree_map(fresh, kwargs)


def equal(left: torch.Tensor, right: torch.Tensor, tolerance: float = 0.0) -> bool:
    """The same dtype and shape, and the same bits (NaNs included) or a relative difference of at most ``tolerance``."""
    if left.dtype != right.dtype or left.shape != right.shape or left.layout != right.layout:
        return False
    if left.layout is torch.sparse_coo:
        left, right = left.to_dense(), right.to_dense()
    if torch.equal(left, right):
        return True
    if tolerance == 0.0:
        return torch.equal(left.isnan(), right.isnan()) and torch.equal(left.nan_to_num(), right.nan_to_num())
    return relative_difference(left, right) <= tolerance


def relative_difference(left: torch.Tensor, right: torch.Tensor) -> float:
    """Largest absolute difference over the largest magnitude of ``right``."""
    if not left.is_floating_point() and not left.is_complex():
        return 0.0 if torch.equal(left, right) else float("inf")
    wide = torch.complex128 if left.is_complex() else torch.float64
    difference = (left.to(wide) - right.to(wide)).abs().max().item()
    scale = right.to(wide).abs().max().item()
    return difference / scale if scale > 0 else (0.0 if difference == 0 else float("inf"))


def assert_same_records(
    actual: Sequence[Record], expected: Sequence[Record], *, tolerance: float = 0.0, layouts: bool = True
) -> None:
    """Fail with the name of the first thing that differs."""
    assert len(actual) == len(expected)
    for iteration, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        where = f"iteration {iteration}"
        assert ours.structure == theirs.structure, f"{where}: output structure"
        for index, (a, b) in enumerate(zip(ours.outputs, theirs.outputs, strict=True)):
            _assert_equal(a, b, f"{where}: output {index}", tolerance)
        if layouts:
            assert ours.layouts == theirs.layouts, f"{where}: output layouts"
        for name, gradient in theirs.gradients.items():
            _assert_equal(ours.gradients[name], gradient, f"{where}: gradient of {name}", tolerance)
        for index, (a, b) in enumerate(zip(ours.input_gradients, theirs.input_gradients, strict=True)):
            _assert_equal(a, b, f"{where}: gradient of input {index}", tolerance)
        assert ours.state.keys() == theirs.state.keys(), f"{where}: names of parameters and buffers"
        for name, tensor in theirs.state.items():
            _assert_equal(ours.state[name], tensor, f"{where}: {name}", tolerance)
        assert torch.equal(ours.generator, theirs.generator), f"{where}: generator state"


def _assert_equal(actual: torch.Tensor | None, expected: torch.Tensor | None, what: str, tolerance: float) -> None:
    if actual is None or expected is None:
        assert actual is expected, f"{what}: {_kind(actual)} instead of {_kind(expected)}"
    elif not equal(actual, expected, tolerance):
        assert actual.dtype == expected.dtype, f"{what}: {actual.dtype} instead of {expected.dtype}"
        assert actual.shape == expected.shape, f"{what}: {actual.shape} instead of {expected.shape}"
        difference = relative_difference(actual, expected)
        raise AssertionError(f"{what}: relative difference {difference:.3g}, tolerance {tolerance:g}")


def _kind(tensor: torch.Tensor | None) -> str:
    return "None" if tensor is None else f"a tensor of shape {tuple(tensor.shape)}"
