"""Train a rematerialized model beside a plain one and compare everything, to the bit.

``compare_training`` trains two models made by the same factory on the same inputs from the same generator state, one plain
and one rematerialized, compares every iteration (see ``tests.support.records``), checks that preparing the model changed
nothing of it, and measures one more iteration against the budget and the predicted peak.

A budget is met or the test fails. A test that wants the smallest budget of a model says ``MINIMUM``; one that its planner
names is then tried, and in a wide run a budget below it must be refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
import torch
import torch.utils._pytree as pytree
from torch import nn

import lowtide
from lowtide.budget import parse_budget
from lowtide.integrations.passes import latest_plans
from lowtide.program.layouts import memory_of
from tests.support.records import (
    SEED,
    Inputs,
    Loss,
    Record,
    Step,
    assert_same_records,
    copy_inputs,
    run_training,
    scalar_loss,
    tensors_of,
    training_step,
)
from tests.support.wide import is_wide

T = TypeVar("T")
BUDGETS = ("70%", "45%")
ITERATIONS = 3
# Quick ones, in turn: what is compared here is the execution of schedules, not their quality. What greedy eviction can meet
# depends on what operators were measured to take, so where it meets no budget, the other one must.
QUICK = f"auto{{effort={int(is_wide())}}}"  # which meet the same budgets
PLANNERS = ("greedy", QUICK)
# The smallest budget that the planner can meet, whatever that is.
MINIMUM = "minimum"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One compared run: the trained model, the records of its iterations, and the peak of a further one."""

    model: nn.Module
    records: Sequence[Record]
    measured_bytes: int


def compare_training(
    model_factory: Callable[[], nn.Module],
    make_inputs: Callable[[int], Inputs],
    loss: Loss = scalar_loss,
    *,
    step: Step | None = None,
    budgets: Sequence[int | str] = BUDGETS,
    quick: int = -1,
    iterations: int = ITERATIONS,
    tolerance: float = 0.0,
    layouts: bool = True,
    check_peak: bool = True,
    prepare: Callable[..., nn.Module] | None = None,
    unmet_bytes: int = 0,
    **options: Any,
) -> list[Outcome]:
    """Compare eager with a rematerialized model at each of ``budgets``, all of which must be met; see ``MINIMUM``. Without the
    slow tests that is one of them: the last and tightest, or the ``quick`` one.

    ``make_inputs(iteration)`` returns ``(args, kwargs)``; the first one is the sample that the plan is made for. A custom
    ``step`` runs forward and backward itself; its peak is compared only where ``check_peak`` holds: it is the predicted one,
    or up to ``unmet_bytes`` less. ``options`` go to
    ``lowtide.rematerialize``, or to ``prepare`` where another preparation is to be compared.
    """
    step_function = step or training_step(loss)
    expected = run_training(make(model_factory), make_inputs, step_function, iterations)
    outcomes = []

    def trained(budget: int | str, **planner: Any) -> tuple[nn.Module, list[Record]]:
        """Where a program that comes later does not meet the budget, that fails, too."""
        model = prepared(model_factory, make_inputs, budget, prepare=prepare, **planner)
        return model, run_training(model, make_inputs, step_function, iterations)

    numbered = [*enumerate(budgets)]
    for index, budget in numbered if is_wide() else [numbered[quick]]:
        usual = PLANNERS[1] if budget == MINIMUM else PLANNERS[index % len(PLANNERS)]
        planner = {} if prepare else {"planner": usual, **options}
        model, records = _by_one_of_both(functools.partial(trained, budget), **planner)
        assert_same_records(records, expected, tolerance=tolerance, layouts=layouts)
        measured = 0
        if check_peak and prepare is None:
            measured = assert_within_plan(model, make_inputs(0), loss, step_function, unmet_bytes)
        outcomes.append(Outcome(model, records, measured))
    return outcomes


def _by_one_of_both(run: Callable[..., T], **options: Any) -> T:
    """By greedy eviction, where that is asked for, or else by the other one of the ``PLANNERS``."""
    try:
        return run(**options)
    except lowtide.InfeasibleBudgetError:
        if options.get("planner") != PLANNERS[0]:
            raise
    return run(**options | {"planner": PLANNERS[1]})


def make(model_factory: Callable[[], nn.Module]) -> nn.Module:
    """The factory's model under a fixed seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return model_factory()


def prepared(
    model_factory: Callable[[], nn.Module],
    make_inputs: Callable[[int], Inputs],
    budget: int | str,
    *,
    prepare: Callable[..., nn.Module] | None = None,
    **options: Any,
) -> nn.Module:
    """A rematerialized model at ``budget``: infeasible budgets fail, see ``MINIMUM``."""
    model = make(model_factory)
    before = _fingerprint(model)
    if prepare is None:
        options.setdefault("planner", PLANNERS[budget == MINIMUM])
    args, kwargs = copy_inputs(make_inputs(0))
    generator = torch.get_rng_state()
    run = prepare or lowtide.rematerialize
    whole = {} if prepare else {"on_capture_error": "error"}  # parts may need less

    def refused(budget: int) -> int:
        """The smallest budget that the error names."""
        with pytest.raises(lowtide.InfeasibleBudgetError) as raised:
            run(model, args, kwargs, budget=budget, **(whole | options))
        assert _fingerprint(model) == before, "a failed preparation changed the model"
        return raised.value.minimum_bytes

    if budget == MINIMUM:
        budget = refused(1)
        if is_wide():
            refused(budget - max(budget // 50, 1))  # planners name the least that they meet to 2 %
    result = _by_one_of_both(functools.partial(run, model, args, kwargs, budget=budget), **options)
    assert result is model
    if prepare is None and not options.keys() & {"reserve", "total_budget", "compiler"}:
        (plan,) = lowtide.plans(model)
        assert plan.budget_bytes == parse_budget(budget, plan.unconstrained_peak_bytes), (
            "another budget than was asked for"
        )
    assert torch.equal(torch.get_rng_state(), generator), "preparation moved the generator"
    after = _fingerprint(model)
    for key, value in before.items():
        assert after[key] == value, f"preparation changed the model's {key}"
    return model


def _fingerprint(model: nn.Module) -> dict[str, Any]:
    """Everything of the model that preparing it must leave as it is."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {
        "state_dict keys": list(model.state_dict()),
        "tensors": [(name, id(tensor), tensor._version, memory_of(tensor)) for name, tensor in tensors],
        "values": [tensor.detach().double().sum().item() for _, tensor in tensors if not tensor.is_complex()],
        "gradients": [None if p.grad is None else id(p.grad) for p in model.parameters()],
        "modules": [(name, id(module), module.training) for name, module in model.named_modules()],
        "hooks": [len(module._forward_hooks) + len(module._backward_hooks) for module in model.modules()],
    }


def assert_within_plan(model: nn.Module, inputs: Inputs, loss: Loss, step: Step, unmet_bytes: int = 0) -> int:
    """Measure one more iteration: its peak must lie within the plan's budget and be the predicted one, to the byte.

    ``unmet_bytes``: that much less is allowed where the plan leaves room for what need not come.

    What the caller's own loss allocates between the two passes is not part of a plan; it is measured apart and allowed.
    """
    args, kwargs = copy_inputs(inputs)
    model.zero_grad(set_to_none=True)
    measured = lowtide.measure(step, model, args, kwargs).peak_bytes
    (plan,) = latest_plans(model)  # planners that end by the clock may plan each signature in another way
    allowance = _caller_bytes(model, inputs, loss)
    predicted = plan.peak_bytes
    assert predicted <= plan.budget_bytes
    assert measured <= plan.budget_bytes + allowance, (
        f"measured peak {measured:,} above the budget {plan.budget_bytes:,} (predicted {predicted:,}, caller {allowance:,})"
    )
    assert measured <= predicted + allowance, f"measured peak {measured:,} above the predicted {predicted:,}"
    assert measured >= predicted - unmet_bytes, f"measured peak {measured:,} below the predicted {predicted:,}"
    return measured


def _caller_bytes(model: nn.Module, inputs: Inputs, loss: Loss) -> int:
    """What ``loss(output).backward()`` allocates outside the model, 0 for a model that returns its loss."""
    args, kwargs = copy_inputs(inputs)
    with torch.no_grad():
        output = model(*args, **kwargs)
    if getattr(output, "loss", None) is not None:
        return 0
    if loss is scalar_loss and not isinstance(output, torch.Tensor):
        output = tensors_of(output)  # objects that pytree does not know
    leaves = pytree.tree_map(_leaf, output)
    if isinstance(leaves, torch.Tensor) and loss(leaves) is leaves:
        return 0
    return lowtide.measure(lambda: loss(leaves).backward()).peak_bytes


def _leaf(value: Any) -> Any:
    differentiable = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
    return value.detach().clone().requires_grad_() if differentiable else value
