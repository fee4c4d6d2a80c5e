"""How a random module is trained, in eager and planned, and what is compared: everything, to the bit."""

from __future__ import annotations

import enum
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import lowtide
from lowtide.errors import CaptureError, InfeasibleBudgetError, PlanError
from tests.fuzz.modules import Description, arguments, build, smaller, surroundings
from tests.support.records import tensors_of

STEPS = 3
_FORMS = ("weighted", "square", "sum", "part", "twice")
_MODES = ("scalar", "scalar", "scalar", "given", "passes", "grad")


class Outcome(enum.Enum):
    """What came of a seed."""

    EQUAL = "equal"
    DIFFERS = "differs"
    REFUSED = "refused"
    INVALID = "without a gradient, or an error in eager"


@dataclass(frozen=True, slots=True)
class Found:
    """An outcome, and why."""

    outcome: Outcome
    why: str = ""


@dataclass(frozen=True, slots=True)
class Term:
    """A part of a loss: of one of the results with a gradient, counted round and round."""

    result: int
    form: str
    weight: float


@dataclass(frozen=True, slots=True)
class Objective:
    """The terms of a step, in order, and how their gradients are asked for."""

    mode: str
    terms: tuple[Term, ...]


def objectives(seed: int) -> tuple[Objective, ...]:
    """Of each step: often the same."""
    rng = random.Random(seed + 1_000_000)

    def objective() -> Objective:
        terms = tuple(
            Term(rng.randrange(12), rng.choice(_FORMS), round(rng.uniform(-2, 2), 3))
            for _ in range(rng.choice((1, 2, 3, 3, 4, 5, 6)))
        )
        return Objective(rng.choice(_MODES), terms)

    steps = [objective()]
    for _ in range(STEPS - 1):
        steps.append(objective() if rng.random() < 0.3 else steps[-1])
    return tuple(steps)


def _number(tensor: torch.Tensor, term: Term, index: int) -> torch.Tensor:
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    real = real if real.dtype is torch.float64 else real.float()
    if term.form == "weighted":
        generator = torch.Generator().manual_seed(index)
        return (real * torch.randn(real.shape, generator=generator, dtype=real.dtype)).sum()
    if term.form == "square":
        return real.square().mean()
    if term.form == "part":
        return real.reshape(-1)[::2].sum() + real.mean()
    return real.sum() if term.form == "sum" else (real * 2).sum() + (real * real).sum()


def _given(tensor: torch.Tensor, index: int) -> torch.Tensor:
    """A gradient, in one of several layouts."""
    generator = torch.Generator().manual_seed(index)
    if index % 3 == 0:
        return torch.randn((), generator=generator).to(tensor.dtype).expand(tensor.shape)
    made = torch.randn(tensor.shape[::-1], generator=generator)
    made = made.permute(list(reversed(range(tensor.dim())))) if index % 3 == 1 else made.reshape(tensor.shape)
    return made.to(tensor.dtype)


def backward(objective: Objective, result: Any, leaves: Sequence[torch.Tensor]) -> None:
    """The backward passes of a step."""
    # Sums for what the model was given itself go on outside of it, in another order (docs/how-it-works.md).
    able = [tensor for tensor in tensors_of(result) if tensor.requires_grad and not tensor.is_leaf]
    chosen = [able[term.result % len(able)] for term in objective.terms]
    if objective.mode == "given":
        distinct = list({id(tensor): tensor for tensor in chosen}.values())
        torch.autograd.backward(distinct, [_given(tensor, index) for index, tensor in enumerate(distinct)])
        return
    numbers = [
        _number(tensor, term, index) * term.weight
        for index, (tensor, term) in enumerate(zip(chosen, objective.terms, strict=True))
    ]
    if objective.mode == "passes" and len(numbers) > 1:
        half = len(numbers) // 2
        _sum(numbers[:half]).backward(retain_graph=True)
        _sum(numbers[half:]).backward()
    elif objective.mode == "grad":
        for leaf, gradient in zip(leaves, torch.autograd.grad(_sum(numbers), leaves, allow_unused=True), strict=True):
            leaf.grad = gradient
    else:
        _sum(numbers).backward()


def _sum(numbers: Sequence[torch.Tensor]) -> torch.Tensor:
    total = numbers[0]
    for number in numbers[1:]:
        total = total + number
    return total


Record = dict[str, Any]


def train(model: nn.Module, description: Description) -> list[Record]:
    """What each step leaves behind, by name."""
    torch.manual_seed(description.seed)
    records = []
    for step, objective in enumerate(objectives(description.seed)):
        given = arguments(description, step)
        model.zero_grad(set_to_none=True)
        with surroundings(description):
            result = model(*given)
        leaves = [tensor for tensor in (*model.parameters(), *given) if tensor.requires_grad]
        record = _outputs(result, given, model)
        backward(objective, result, leaves)
        gradients = {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
        gradients |= {f"gradient of argument {i}": tensor.grad for i, tensor in enumerate(given)}
        with torch.no_grad():
            record |= {name: None if g is None else g.clone() for name, g in gradients.items()}
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.01 * parameter.grad
            record |= {name: tensor.clone() for name, tensor in model.state_dict().items()}
        record["generator"] = torch.get_rng_state()
        records.append(record)
    return records


def _outputs(result: Any, given: Sequence[torch.Tensor], model: nn.Module) -> Record:
    tensors = tensors_of(result)
    record: Record = {f"result {i}": tensor.detach().clone() for i, tensor in enumerate(tensors)}
    around = [*tensors, *given, *model.parameters()]
    places = [tensor.untyped_storage().data_ptr() for tensor in around]
    record["who shares memory"] = [[one == two for two in places] for one in places[: len(tensors)]]
    record["who is the same"] = [[one is two for two in around] for one in tensors]
    record["layouts"] = [(t.dtype, t.shape, t.stride(), t.storage_offset(), t.is_conj()) for t in tensors]
    record["autograd"] = [(t.requires_grad, t.is_leaf) for t in tensors]
    return record


def difference(ours: Sequence[Record], theirs: Sequence[Record]) -> str:
    """The first one, in words."""
    for step, (mine, its) in enumerate(zip(ours, theirs, strict=True)):
        for name, value in its.items():
            if not _same(mine[name], value):
                return f"step {step}, {name}: {_distance(mine[name], value)}"
    return ""


def _same(one: Any, two: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(two, torch.Tensor):
        return bool(one == two) if not isinstance(one, torch.Tensor) and not isinstance(two, torch.Tensor) else False
    if one.dtype != two.dtype or one.shape != two.shape:
        return False
    return torch.equal(one, two) or (torch.equal(one.isnan(), two.isnan()) and torch.allclose(one, two, 0, 0, True))


def _distance(one: Any, two: Any) -> str:
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor) and one.shape == two.shape:
        return f"off by {(one - two).abs().max().item():.2e}" if one.dtype == two.dtype else f"{one.dtype}, {two.dtype}"
    return f"{_short(one)} instead of {_short(two)}"


def _short(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else str(value)[:300]


Make = Callable[[Description], nn.Module]


def prepared(description: Description, budget: int | str, make: Make = build) -> nn.Module:
    """The module, planned."""
    model = make(description)
    with surroundings(description):
        lowtide.rematerialize(model, arguments(description, 0), budget=budget, planner="greedy")
    return model


def compare(description: Description, make: Make = build) -> Found:
    """Train the module that ``make`` makes of a description in eager and planned."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = train(make(description), description)
        except (RuntimeError, ValueError, IndexError, KeyError, TypeError, ZeroDivisionError) as error:
            return Found(Outcome.INVALID, str(error))
        return _compare(description, expected, make)


def _compare(description: Description, expected: Sequence[Record], make: Make) -> Found:
    budget: int | str = f"{description.budget}%"
    for _ in range(STEPS + 1):
        try:
            why = difference(train(prepared(description, budget, make), description), expected)
        except InfeasibleBudgetError as error:  # at first, or for gradients that arrive otherwise than was expected
            if isinstance(budget, int) and error.minimum_bytes <= budget:
                return Found(Outcome.DIFFERS, f"the smallest budget named, {budget} bytes, is refused: {error}")
            budget = error.minimum_bytes
        except (CaptureError, PlanError) as error:  # a plan error: nothing takes memory
            return Found(Outcome.REFUSED, str(error))
        except Exception as error:  # noqa: BLE001
            return Found(Outcome.DIFFERS, f"{type(error).__name__}: {error}")
        else:
            return Found(Outcome.DIFFERS, why) if why else Found(Outcome.EQUAL)
    return Found(Outcome.DIFFERS, f"no budget suffices: {budget}")


def smallest(description: Description, fails: Callable[[Description], bool] | None = None) -> Description:
    """A description that fails in the same way and none of whose ``smaller`` ones does."""
    symptom = _symptom(compare(description)) if fails is None else ""
    fails = fails or (lambda other: _symptom(compare(other)) == symptom)
    while True:
        better = next((other for other in smaller(description) if fails(other)), None)
        if better is None:
            return description
        description = better


def _symptom(found: Found) -> str:
    """What is the same for failures of one cause."""
    return "other bits" if "off by" in found.why else f"{found.outcome} {found.why.split(':')[0]}"
