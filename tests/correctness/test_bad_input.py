"""Bad input: each a clear error that says what to do, or documented behaviour."""

from __future__ import annotations

import copy
import itertools
import queue
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowtide
from tests.support.networks import BATCH, WithLoss, perceptron, rows
from tests.support.records import assert_same_records, run_training, training_step
from tests.support.training import compare_training, make, prepared

_STEP = training_step()


def _network() -> nn.Module:
    return WithLoss(perceptron(4))


@pytest.mark.parametrize(
    "budget",
    [0, -1, "0", "-5 MB", "12 apples", "", "%", "0%", "-40%", "nan", "inf GiB", True, float("nan"), [1], "1e400"],
    ids=repr,
)
@pytest.mark.parametrize("entry", ["rematerialize", "plan"])
def test_budget_that_is_none(entry: str, budget: Any) -> None:
    model = make(_network)
    with pytest.raises(lowtide.PlanError) as caught:
        getattr(lowtide, entry)(model, *rows()(0), budget=budget)
    message = str(caught.value)
    assert "budget" in message
    assert re.search(r"\d+ ?(GiB|MB|MiB|%)", message), f"no example of a good budget in {message!r}"
    assert not isinstance(caught.value, lowtide.InfeasibleBudgetError)
    assert_same_records(run_training(model, rows(), _STEP, 1), run_training(make(_network), rows(), _STEP, 1))


@pytest.mark.parametrize("reserve", [-1, "-1", -0.5, "-0.4%", 0.1, "0.1", None, True, "much", float("nan")], ids=repr)
def test_reserve_that_is_none(reserve: Any) -> None:
    with pytest.raises(lowtide.PlanError, match=r"reserve.*8GiB"):
        lowtide.rematerialize(make(_network), *rows()(0), budget="70%", reserve=reserve)


@pytest.mark.parametrize("reserve", [0, 0.0, "0", "0B", "0%"], ids=repr)
def test_nothing_is_reserved(reserve: Any) -> None:
    model = lowtide.rematerialize(make(_network), *rows()(0), budget="100%", planner="greedy", reserve=reserve)
    (plan,) = lowtide.plans(model)
    assert plan.budget_bytes == plan.unconstrained_peak_bytes


@pytest.mark.parametrize("verb", [lowtide.rematerialize, lowtide.plan])
def test_keyword_arguments_that_are_a_tensor(verb: Any) -> None:
    (x,), _ = rows()(0)
    with pytest.raises(lowtide.PlanError, match="kwargs is a Tensor, not a dictionary"):
        verb(make(_network), (), x, budget="70%")


def test_a_percentage_without_its_sign() -> None:
    with pytest.raises(
        lowtide.InfeasibleBudgetError, match=r'within 60 bytes .* For that part of the peak write "60%"'
    ):
        lowtide.plan(make(_network), *rows()(0), budget=60)


def test_no_budget() -> None:
    with pytest.raises(lowtide.PlanError, match="budget"):
        lowtide.rematerialize(make(_network), *rows()(0))


def test_two_budgets() -> None:
    with pytest.raises(lowtide.PlanError, match="total_budget"):
        lowtide.rematerialize(make(_network), *rows()(0), budget="40%", total_budget="1GiB")


def test_budget_above_everything_recomputes_nothing() -> None:
    plan = lowtide.plan(make(_network), *rows()(0), budget="1 GiB", planner="greedy")
    assert plan.overhead == 0
    assert plan.peak_bytes <= plan.unconstrained_peak_bytes
    compare_training(_network, rows(), budgets=("1 GiB",))


def test_budget_above_the_device() -> None:
    with pytest.raises(lowtide.PlanError, match="more than the device"):
        lowtide.rematerialize(make(_network), *rows()(0), budget="5000 TiB")


def test_budget_below_everything() -> None:
    with pytest.raises(lowtide.InfeasibleBudgetError) as caught:
        lowtide.rematerialize(make(_network), *rows()(0), budget=100, planner="greedy")
    error = caught.value
    assert error.minimum_bytes > 100
    assert error.operator
    assert "networks.py" in error.source
    plan = lowtide.plan(make(_network), *rows()(0), budget=error.minimum_bytes, planner="greedy")
    assert plan.peak_bytes <= error.minimum_bytes


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"planner": "best"}, "planner"),
        ({"planner": "auto{effort=banana}"}, "effort"),
        ({"planner": "auto{depth=3}"}, "depth"),
        ({"compiler": "gcc"}, "compiler"),
        ({"on_new_signature": "ignore"}, "on_new_signature"),
        ({"reserve": -1}, "reserve"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unknown_options(options: dict[str, Any], word: str) -> None:
    with pytest.raises(lowtide.PlanError, match=word):
        lowtide.rematerialize(make(_network), *rows()(0), budget="70%", **options)


def test_model_without_parameters() -> None:
    with pytest.raises(lowtide.CaptureError, match="gradient"):
        lowtide.rematerialize(
            nn.Sequential(nn.Tanh(), nn.Sigmoid()), *rows()(0), budget="70%", on_capture_error="error"
        )


def test_model_without_parameters_but_with_differentiable_input() -> None:
    compare_training(lambda: WithLoss(nn.Sequential(nn.Tanh(), nn.Sigmoid(), nn.Tanh())), rows(requires_grad=True))


@pytest.mark.parametrize("how", ["frozen", "detached", "nothing returned"])
def test_no_output_requires_a_gradient(how: str) -> None:
    class Without(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = perceptron(2)

        def forward(self, x: torch.Tensor) -> Any:
            y = self.body(x)
            return None if how == "nothing returned" else y.detach() if how == "detached" else y

    model = make(Without)
    if how == "frozen":
        model.requires_grad_(False)
    with pytest.raises(lowtide.CaptureError, match="gradient"):
        lowtide.rematerialize(model, *rows()(0), budget="70%", on_capture_error="error")


def test_two_devices() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32, device="meta"))
    with pytest.raises(lowtide.CaptureError, match="device"):
        lowtide.rematerialize(model, *rows()(0), budget="70%", on_capture_error="error")


def test_input_on_another_device() -> None:
    with pytest.raises(lowtide.CaptureError, match="device"):
        lowtide.rematerialize(
            make(_network), (torch.empty(64, 32, device="meta"),), budget="70%", on_capture_error="error"
        )


def test_meta_model_can_be_planned_but_not_run() -> None:
    with torch.device("meta"):
        model, x = _network(), torch.empty(64, 32)
    plan = lowtide.plan(model, (x,), {}, budget="70%", planner="greedy")
    assert plan.peak_bytes <= plan.budget_bytes
    with pytest.raises(lowtide.PlanError, match="on the meta device can be planned"):
        lowtide.rematerialize(model, (x,), budget="70%")


def test_meta_model_whose_memory_comes_later() -> None:
    """As trainers have it, who make the parameters when they have wrapped the model."""
    with torch.device("meta"):
        model, x = _network(), torch.empty(64, 32)
    lowtide.rematerialize(model, budget="70%", planner="greedy")
    with pytest.raises(lowtide.PlanError, match="on the meta device can be planned"):
        model(x)
    plain = make(_network)
    model.to_empty(device="cpu").load_state_dict(plain.state_dict())
    assert_same_records(run_training(model, rows(), _STEP, 2), run_training(plain, rows(), _STEP, 2))
    (plan,) = lowtide.plans(model)
    assert plan.peak_bytes <= plan.budget_bytes


def test_meta_model_knows_its_own_constants() -> None:
    """A question about positions made inside the model has an answer without data."""

    class Positioned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = _network()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            steps = torch.arange(x.shape[0], device=x.device).diff()
            return self.body(x) if (steps == 1).all() else self.body(-x)

    with torch.device("meta"):
        model, x = Positioned(), torch.empty(64, 32)
    plan = lowtide.plan(model, (x,), budget="70%", planner="greedy")
    assert plan.peak_bytes <= plan.budget_bytes


def test_already_rematerialized() -> None:
    model = prepared(_network, rows(), "70%")
    with pytest.raises(lowtide.LowtideError, match="the model is rematerialized already"):
        lowtide.rematerialize(model, *rows()(0), budget="50%")
    assert_same_records(run_training(model, rows(), _STEP, 2), run_training(make(_network), rows(), _STEP, 2))


def test_part_of_the_model_is_already_rematerialized() -> None:
    """An error that names the part, which trains on as it was."""
    model = make(_network)
    lowtide.rematerialize(model.body, *rows()(0), budget="70%", planner="greedy")
    with pytest.raises(lowtide.PlanError, match="submodule 'body' is rematerialized already"):
        lowtide.rematerialize(model, *rows()(0), budget="70%")
    assert_same_records(run_training(model, rows(), _STEP, 2), run_training(make(_network), rows(), _STEP, 2))


@pytest.mark.parametrize("hook", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_backward_hooks_on_submodules(hook: str) -> None:
    model = make(_network)
    getattr(model.body[2], hook)(lambda *_: None)
    with pytest.raises(lowtide.CaptureError, match="hook") as caught:
        lowtide.rematerialize(model, *rows()(0), budget="70%", on_capture_error="error")
    assert "body.2" in str(caught.value)


def test_forward_hooks_on_submodules_are_part_of_the_program() -> None:
    def network() -> nn.Module:
        model = _network()
        model.body[2].register_forward_hook(lambda module, args, y: y * 2)
        return model

    compare_training(network, rows(), budgets=("60%",))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_inside_the_model(reentrant: bool, caplog: pytest.LogCaptureFixture) -> None:
    """What is computed again is the plan's to say, under the same random numbers."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.rest = nn.Linear(32, 32), nn.Sequential(perceptron(2), nn.Dropout(0.5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.rest, self.first(x), use_reentrant=reentrant).mean()

    compare_training(Checkpointed, rows(), budgets=("70%",))
    assert "is left to the plan" in caplog.text


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_reentrant_checkpoint_without_gradients() -> None:
    """None of its arguments has a gradient, so what is inside has none either, as in eager."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.rest = nn.Linear(32, 32), perceptron(2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.rest(checkpoint(self.first, x, use_reentrant=True)).mean()

    compare_training(Checkpointed, rows(), budgets=("90%",))


def test_not_a_number() -> None:
    """NaNs and infinities pass through as in eager."""

    def inputs(iteration: int) -> Any:
        (x,), _ = rows()(iteration)
        x[iteration, 3], x[5, 5] = float("nan"), float("inf")
        return (x,), {}

    compare_training(_network, inputs)


_SAMPLES = {
    "unknown keyword": (),
    "text": ("text",),
    "number": (1,),
    "wrong width": (torch.zeros(3, 7),),
    "too many": (torch.zeros(2, 32),) * 2,
}


@pytest.mark.parametrize("name", _SAMPLES)
def test_sample_that_does_not_fit(name: str) -> None:
    """The sample is not what the model takes: the error says so and carries the model's own message."""
    model = make(_network)
    sample = _SAMPLES[name]
    with pytest.raises((lowtide.CaptureError, TypeError)) as caught:
        lowtide.rematerialize(model, sample, None if sample else {"wrong": 1}, budget="70%", on_capture_error="error")
    assert str(caught.value)
    assert_same_records(run_training(model, rows(), _STEP, 1), run_training(make(_network), rows(), _STEP, 1))


def test_a_sample_that_does_not_fit_is_forgotten() -> None:
    """It could not be captured, which makes no parts of a model whose calls can."""
    model = make(_network)
    lowtide.rematerialize(model, (torch.zeros(3, 7),), budget="70%")
    assert_same_records(run_training(model, rows(), _STEP, 2), run_training(make(_network), rows(), _STEP, 2))
    assert len(lowtide.plans(model)) == 1


@pytest.mark.parametrize("entry", [lowtide.rematerialize, lowtide.plan])
def test_sample_that_is_no_tuple(entry: Any) -> None:
    with pytest.raises(lowtide.PlanError, match=r"args is a Tensor.*give a tuple"):
        entry(make(_network), torch.randn(2, 32), budget="70%")
    with pytest.raises(lowtide.PlanError, match="kwargs is a list"):
        entry(make(_network), (), [torch.randn(2, 32)], budget="70%")


@pytest.mark.parametrize("given", [("60%",), (0.6,), ((), "60%")])
def test_a_budget_without_its_name(given: tuple[Any, ...]) -> None:
    with pytest.raises(lowtide.PlanError, match=rf"^k?w?args is a (str|float).* by its name: budget={given[-1]!r}"):
        lowtide.rematerialize(make(_network), *given)


def test_call_that_does_not_fit_raises_what_eager_raises() -> None:
    model = prepared(_network, rows(), "70%")
    for wrong in ((torch.randn(3, 7),), (), (torch.randn(2, 32), 1)):
        with pytest.raises((RuntimeError, TypeError, lowtide.CaptureError)):
            model(*wrong)
    assert_same_records(run_training(model, rows(), _STEP, 2), run_training(make(_network), rows(), _STEP, 2))


@pytest.mark.parametrize(
    "options", [{"optimizer": True}, {"arena": True}, {"budget": "1GiB", "on_capture_error": "online"}], ids=str
)
def test_after_a_call_that_does_not_fit_all_is_as_before(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Updates inside of the backward pass, the arena, and plans instead of the online mode."""
    model, (x,) = make(_network), rows()(0)[0]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    given = {"budget": "70%"} | options | ({"optimizer": optimizer} if "optimizer" in options else {})
    lowtide.rematerialize(model, (x,), **given)

    def step() -> list[Any]:
        model(x).sum().backward()
        gradients = {type(parameter.grad) for parameter in model.parameters()}
        optimizer.step()
        optimizer.zero_grad()
        runtime: Any = model.forward
        return [gradients, runtime.is_online, [one.arena is None for (one,) in runtime.entries.values()]]

    before = step()
    with pytest.raises(RuntimeError):
        model(torch.randn(3, 7))
    assert step() == before
    assert "are kept until" not in caplog.text


def test_not_a_module() -> None:
    with pytest.raises((TypeError, lowtide.LowtideError), match=r"[Mm]odule"):
        lowtide.rematerialize(lambda x: x, *rows()(0), budget="70%")


def test_sparse_parameter_is_refused() -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = perceptron(2)
            self.adjacency = nn.Parameter(torch.eye(BATCH).to_sparse())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sparse.mm(self.adjacency, self.body(x)).mean()

    with pytest.raises(lowtide.CaptureError):
        lowtide.rematerialize(make(Sparse), *rows()(0), budget="70%", on_capture_error="error")


def test_plans_and_restore_of_a_plain_model() -> None:
    model = make(_network)
    for function in (lowtide.plans, lowtide.restore):
        with pytest.raises(lowtide.PlanError, match="is not rematerialized"):
            function(model)
        with pytest.raises(lowtide.PlanError, match=r"takes a torch.nn.Module, not a NoneType"):
            function(None)  # type: ignore[arg-type]


def test_preparation_under_no_grad() -> None:
    """Preparing a model for training inside ``no_grad`` plans its training all the same."""
    model = make(_network)
    with torch.no_grad():
        lowtide.rematerialize(model, *rows()(0), budget="70%", planner="greedy")
    assert_same_records(run_training(model, rows(), _STEP, 2), run_training(make(_network), rows(), _STEP, 2))


class _Taking(nn.Module):
    """Takes a number of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))

    def forward(self, x: torch.Tensor, numbers: Any) -> torch.Tensor:
        number = numbers.get() if isinstance(numbers, queue.Queue) else next(numbers)
        return (self.layers(x) * number).square().sum()


def _filled() -> queue.Queue[int]:
    numbers: queue.Queue[int] = queue.Queue()
    for number in range(1, 9):
        numbers.put(number)
    return numbers


@pytest.mark.parametrize("make", [lambda: iter([*range(1, 9)]), lambda: itertools.count(1), _filled])
def test_what_is_spent_is_left_to_the_model(make: Callable[[], Any]) -> None:
    plain, x = _Taking(), torch.randn(4, 8)
    model, given, numbers = copy.deepcopy(plain), make(), make()
    lowtide.rematerialize(model, budget="100%", planner="greedy")
    for _ in range(4):
        assert torch.equal(model(x, given), plain(x, numbers))
    strict = lowtide.rematerialize(copy.deepcopy(plain), budget="100%", on_capture_error="error")
    with pytest.raises(lowtide.CaptureError, match="gives what it holds only once"):
        strict(x, make())


def test_a_model_that_is_compiled_in_place_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model.compile(backend="eager")
    with pytest.raises(lowtide.PlanError, match=r"module\.compile\(\) has compiled the model in place"):
        lowtide.rematerialize(model, budget="50%")


def test_a_sample_of_another_type_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Whose operators cannot be run by themselves."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)))
    lowtide.rematerialize(model, (torch.zeros(512, 64, dtype=torch.double),), budget="60%")
    said = [record.message for record in caplog.records if "its cost is estimated" in record.message]
    assert len(said) == len({*said})
