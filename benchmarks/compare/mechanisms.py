"""The mechanisms that are compared. Each turns a model into one that takes less memory, for one setting.

``MECHANISMS[name]`` says which settings there are, whether operators run compiled, and how to prepare a model. Settings of
lowtide's own mechanisms are budgets in percent of plain eager's peak, or in bytes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint as stock

from benchmarks.zoo import Sample

Step = Callable[[], Any]
Blocks = Callable[[nn.Module], list[nn.Module]]
ACTIVATION_BUDGETS = ("0.7", "0.5", "0.3", "0.1", "0.05")
_SAVED = ("mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_dot_product_flash_attention_for_cpu",
          "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Job:
    """One model to prepare: its sample, the blocks that a user would checkpoint, plain eager's peak, the planner."""

    sample: Sample
    blocks: Blocks
    plain_peak_bytes: int
    planner: str

    def budget_bytes(self, setting: str) -> int:
        if setting.endswith("%"):
            return int(float(setting.rstrip("%")) * self.plain_peak_bytes / 100)
        return int(setting)


Prepare = Callable[[Job, str], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class Mechanism:
    """``prepare(job, setting)`` changes the job's model; steps run inside what it returns. ``settings``: fixed ones;
    without them the budgets of the command line are the settings."""

    prepare: Prepare
    compiled: bool = False
    settings: tuple[str, ...] = ()

    @property
    def budgeted(self) -> bool:
        return not self.settings


def _plain(job: Job, setting: str) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext()


def _checkpointed(job: Job, setting: str, **options: Any) -> contextlib.AbstractContextManager[Any]:
    for block in job.blocks(job.sample[0]):
        _wrap(block, **options)
    return contextlib.nullcontext()


def _wrap(block: nn.Module, **options: Any) -> None:
    original = block.forward

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        def positional(*values: Any) -> Any:
            """The reentrant form takes no keywords, and gives no gradients to what it gets otherwise."""
            own = values[: len(args)]
            return original(*own, **dict(zip(kwargs, values[len(args) :], strict=True)))

        return stock.checkpoint(positional, *args, *kwargs.values(), **options)

    block.forward = forward  # type: ignore[method-assign]


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
    name = operator.__name__.split(".")[0] if hasattr(operator, "__name__") else ""
    saved = stock.CheckpointPolicy.MUST_SAVE
    return saved if name in _SAVED else stock.CheckpointPolicy.PREFER_RECOMPUTE


def _selective(job: Job, setting: str) -> contextlib.AbstractContextManager[Any]:
    contexts = functools.partial(stock.create_selective_checkpoint_contexts, _policy)
    return _checkpointed(job, setting, use_reentrant=False, context_fn=contexts)


def _compiled(job: Job, setting: str, *, blocks: bool = False, solver: str = "") -> Any:
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    if blocks:
        _checkpointed(job, setting, use_reentrant=False)
    torch._dynamo.reset()
    changes = {"activation_memory_budget": float(setting), "activation_memory_budget_solver": solver} if solver else {}
    model, args, kwargs = job.sample
    # The default layout optimisation gives wrong gradients for the U-Net on the CPU.
    with functorch.patch(changes), inductor.patch(layout_optimization=False):
        model.compile()
        _loss(model(*args, **kwargs)).backward()
    model.zero_grad(set_to_none=True)
    return contextlib.nullcontext()


def _loss(result: Any) -> torch.Tensor:
    from benchmarks.zoo import loss_of

    return loss_of(result)


def _planned(job: Job, setting: str, *, planner: str = "", compiler: str = "eager") -> Any:
    import lowtide

    model, args, kwargs = job.sample
    budget = job.budget_bytes(setting)
    lowtide.rematerialize(
        model, args, kwargs, budget=budget, planner=planner or job.planner, compiler=compiler, planning="wait"
    )
    return contextlib.nullcontext()


def _online(job: Job, setting: str) -> Any:
    import lowtide

    return lowtide.online(job.budget_bytes(setting))


def _solver(name: str) -> Mechanism:
    return Mechanism(functools.partial(_compiled, solver=name), compiled=True, settings=ACTIVATION_BUDGETS)


def _own(planner: str) -> Mechanism:
    return Mechanism(functools.partial(_planned, planner=planner))


_ONE = ("",)
MECHANISMS: dict[str, Mechanism] = {
    "plain": Mechanism(_plain, settings=_ONE),
    "checkpoint": Mechanism(functools.partial(_checkpointed, use_reentrant=False), settings=_ONE),
    "checkpoint-reentrant": Mechanism(functools.partial(_checkpointed, use_reentrant=True), settings=_ONE),
    "selective": Mechanism(_selective, settings=_ONE),
    "compile": Mechanism(_compiled, compiled=True, settings=_ONE),
    "compile-checkpoint": Mechanism(functools.partial(_compiled, blocks=True), compiled=True, settings=_ONE),
    "compile-budget-dp": _solver("dp"),
    "compile-budget-ilp": _solver("ilp"),
    "lowtide": Mechanism(_planned),
    "lowtide-inductor": Mechanism(functools.partial(_planned, compiler="inductor"), compiled=True),
    "lowtide-rotor": _own("rotor"),
    "lowtide-rockmate": _own("rockmate"),
    "lowtide-h-rockmate": _own("h-rockmate"),
    "lowtide-checkmate": _own("checkmate"),
    "lowtide-dtr": _own("dtr"),
    "lowtide-online": Mechanism(_online),
}
RIVALS = tuple(name for name in MECHANISMS if name != "plain" and not name.startswith("lowtide"))
MATCHING = ("lowtide", "lowtide-inductor")  # these run at the peaks that the rivals of their kind measured, too
EAGER = tuple(name for name, mechanism in MECHANISMS.items() if not mechanism.compiled)
COMPILED = tuple(name for name, mechanism in MECHANISMS.items() if mechanism.compiled)
