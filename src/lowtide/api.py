"""The public functions."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from lowtide import pipeline
from lowtide.budget import is_number
from lowtide.capture.arguments import require_call
from lowtide.capture.copies import planned_forward
from lowtide.capture.model_state import model_state
from lowtide.capture.refusals import require_module
from lowtide.dynamic.context import is_inside
from lowtide.errors import PlanError
from lowtide.planning import Plan
from lowtide.program.distributed.local import hooked
from lowtide.program.optimizer_state import optimizer_state_bytes
from lowtide.program.tangents import with_own_tangents
from lowtide.progress import Progress, told
from lowtide.runtime.caller import let_go
from lowtide.runtime.model import Rematerialized
from lowtide.runtime.planned import Planned
from lowtide.runtime.programs.owning import is_worth_owning
from lowtide.runtime.stages import plan_stages, stages_of
from lowtide.runtime.updates.of_model import of_model
from lowtide.settings import Settings, searches

Model = TypeVar("Model", bound=nn.Module)


def rematerialize(
    model: Model,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget: int | str | None = None,
    total_budget: int | str | None = None,
    reserve: int | str = 0,
    planner: str = "auto",
    compiler: str = "eager",
    on_new_signature: str = "plan",
    on_capture_error: str = "parts",
    seed: int = 0,
    planning: str | None = None,
    dynamic: bool | None = None,
    max_programs: int = 64,
    arena: bool = False,
    offload: str | None = None,
    offload_budget: int | str | None = None,
    rescue: bool = True,
    chunked_loss: bool = False,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    keep_gradients: bool = False,
    in_flight: int = 1,
) -> Model:
    """Make ``model``, any module, train inside a memory budget. Changes it in place and returns the same object.

    Raises ``InfeasibleBudgetError`` if no schedule fits (``minimum_bytes`` is the smallest budget for which one is
    known), ``CaptureError`` if the model is no single program and ``on_capture_error`` (or ``in_flight``) allows no
    other way to run it, and ``PlanError`` for invalid arguments.

    Args:
        args, kwargs: A sample call. With one, the plan is made now; without, at the first call in training mode.
        budget: For a forward and backward pass, above what was allocated before: bytes, ``"8GiB"``, ``"40%"`` of its
            peak.
        total_budget: Instead of ``budget``: for everything, with parameters, buffers, inputs, gradients and optimizer
            states: those of ``optimizer``, or two for each parameter.
        reserve: The part of the budget to leave free, for a loss outside the model, say: bytes, ``"64MiB"``.
        planner: Name and options of one of ``lowtide planners``.
        compiler: ``"eager"``: equal results to the bit. ``"inductor"``: quicker fused kernels, close results.
        on_new_signature: For a call without a plan: ``"plan"`` it, run it ``"eager"`` (warns once), or raise an
            ``"error"``.
        on_capture_error: For a model that is no single program: plan it in ``"parts"`` (or run it online if it has no
            submodules to plan), run it ``"online"`` at once, or raise an ``"error"``.
        seed: For the planner. The same program, costs and seed give the same plan.
        planning: ``"background"`` (default for planners that search): train with a first plan while better ones are
            searched, with the same results. ``"wait"``: finish the search first.
        dynamic: One capture for all sizes: from the third shape on (``None``), at once (``True``), never (``False``).
        max_programs: How many plans are kept, one for each kind of call; the least recently used one is dropped.
        arena: Give every tensor of a pass an address in memory that is kept between steps. The budget is for addresses.
        offload: Where tensors may move and come back from: ``"disk"``, ``"disk:/folder"``; on accelerators ``"cpu"``.
        offload_budget: Most bytes that may be there at one time for a pass; default: all that are free.
        rescue: If a pass runs out of memory, run it again within a lower budget, and log this.
        chunked_loss: Compute logits and their cross-entropy in pieces, never as a whole. Sums are not equal to the bit.
        optimizer: Update parameters inside the backward pass, so that gradients are freed at once; the loop stays as it
            is. May be several optimizers with separate parameters (Muon for matrices, AdamW for the rest).
        keep_gradients: With ``optimizer``: keep gradients until its step, for code that reads all of them (clipping).
        in_flight: How many calls wait at once, each for its own backward pass (micro-batches); the budget is for all.
            With more than one, plans do not change: ``planning`` waits, and there are no parts and no ``rescue``.
    """
    _require_plannable(model)
    require_call(args, kwargs)
    if in_flight != 1:  # a changed plan would not account for the other calls
        planning, rescue = planning or "wait", False
        on_capture_error = "error" if on_capture_error == "parts" else on_capture_error
    given = (budget, total_budget, reserve, planner, compiler, on_new_signature, on_capture_error, seed)
    more = (_planning(planning, planner), dynamic, max_programs, arena, offload, offload_budget, rescue)
    settings = Settings(*given, *more, chunked_loss, in_flight=in_flight)
    if keep_gradients and optimizer is None:
        raise PlanError("keep_gradients=True is said of an optimizer's; give optimizer=, too.")
    model.forward = _prepared(model, settings, optimizer, keep_gradients, args, kwargs)
    return model


def rematerialize_stages(
    schedule: Any,
    *samples: Sequence[Any],
    budget: int | str,
    reserve: int | str = 0,
    planner: str = "auto",
    seed: int = 0,
) -> None:
    """Make this rank's stages of a pipeline train inside one memory budget together, in place.

    ``schedule``: one of ``torch.distributed.pipelining`` with whole backward passes (``ScheduleGPipe``,
    ``Schedule1F1B``, ``ScheduleInterleaved1F1B``). It determines how many micro-batches of each stage are in flight.
    ``samples``: the arguments of a micro-batch, for each of the rank's stages in order. Of the plans that fit
    ``budget`` together, those with the least time of a micro-batch in all stages of the rank are chosen.

    ``budget``, ``reserve``, ``planner`` and ``seed``: as for ``rematerialize``; a percentage refers to the peak of all
    passes of a step without rematerialization. Raises the errors of ``rematerialize``, and then leaves all stages
    unchanged.
    """
    stages = [stage.submod for stage in stages_of(schedule)]
    for stage in stages:
        _require_plannable(stage)
    settings = Settings(budget=budget, reserve=reserve, planner=planner, seed=seed, rescue=False)
    for stage, planned in zip(stages, plan_stages(schedule, samples, settings), strict=True):
        stage.forward = planned


def _prepared(
    model: nn.Module,
    settings: Settings,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    keep_gradients: bool,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
) -> Rematerialized:
    """The planned forward of ``model``, with a plan for the sample call, if given."""
    if optimizer is not None and settings.arena:
        raise PlanError(
            "optimizer= and arena=True do not go together: the state that an optimizer creates has no place in an arena."
        )
    if optimizer is not None and settings.total_budget is not None:
        settings = dataclasses.replace(settings, optimizer_bytes=optimizer_state_bytes(optimizer, model)[1])
    for module in model.modules():
        copied = module.__dict__.get("forward")
        if isinstance(copied, Planned) and copied.is_copied_in(module):
            let_go(module, copied)
    runtime = Rematerialized(model, settings)
    if optimizer is not None:
        moves_states = settings.total_budget is not None
        runtime.optimizer = of_model(
            optimizer, model, settings.offload, moves_states=moves_states, keeps=keep_gradients
        )
    given = {} if kwargs is None else kwargs
    empty = isinstance(args, Sequence) and len(args) == 0 and isinstance(given, Mapping) and len(given) == 0
    if not empty:
        try:
            runtime.prepare(args, given)
        except BaseException:
            runtime.end()
            raise
    return runtime


def _planning(given: str | None, planner: str) -> str:
    """The given value; by default ``"background"`` if the planner searches."""
    return given or ("background" if searches(planner) else "wait")


def _require_plannable(model: nn.Module) -> None:
    """Raise ``PlanError`` if the model cannot get a planned forward pass."""
    require_module(model, "rematerialize")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise PlanError("rematerialize the model inside: DistributedDataParallel(lowtide.rematerialize(model, ...)).")
    if model._compiled_call_impl is not None:
        raise PlanError(
            "module.compile() has compiled the model in place, what runs its plan included. Leave that out, or call "
            "torch.compile on the rematerialized model, which then runs by its plan; "
            'torch.compile(model, backend="lowtide") plans compiled graphs.'
        )
    if runtime_of(model) is not None:
        raise PlanError("the model is rematerialized already; call lowtide.restore(model) first to change its budget.")
    inner = next((name for name, m in model.named_modules() if name and runtime_of(m) is not None), None)
    if inner is not None:
        raise PlanError(
            f"submodule {inner!r} is rematerialized already; restore it, or leave the outer model as it is."
        )


def restore(model: Model) -> Model:
    """Undo ``rematerialize``: ``model`` runs its own ``forward`` again. Returns the same object.

    Frees the plans and what they know of the model, so that its memory is freed with the last reference to it. (A
    rematerialized model and its plans refer to each other, so Python's garbage collector must find them.) Raises
    ``PlanError`` if the model is not rematerialized, or its planned ``forward`` has been wrapped since.
    """
    runtime = _planned(model)
    placed = model.__dict__["forward"]
    if runtime not in (placed, getattr(placed, "__func__", None)):
        raise PlanError(
            "the planned forward has been wrapped since (by accelerate's mixed precision, say); take the wrapper off first, "
            "for instance with accelerator.unwrap_model(model, keep_fp32_wrapper=False)."
        )
    runtime.end()
    del model.__dict__["forward"]
    if runtime.had_instance_forward:
        model.forward = runtime.original_forward
    del runtime, placed
    gc.collect()
    return model


class accumulating:
    """A context in which backward passes of a model with ``optimizer=`` update nothing: gradients are added up in
    ``.grad``, as without ``optimizer=``. Run the passes of all batches but the last of a step inside it. The last one,
    outside, adds its gradients and updates::

        for index, batch in enumerate(batches):
            more = (index + 1) % 4 != 0
            with lowtide.accumulating(model) if more else contextlib.nullcontext():
                loss(model(batch)).backward()
            if not more:
                optimizer.step()
                optimizer.zero_grad()

    Without ``optimizer=`` it has no effect. It is not needed with accelerate (and the Trainer of transformers). Raises
    ``PlanError`` if the model is not rematerialized.
    """

    def __init__(self, model: nn.Module) -> None:
        self._optimizer = _planned(model).optimizer

    def __enter__(self) -> accumulating:
        if self._optimizer is not None:
            self._optimizer.accumulating += 1
        return self

    def __exit__(self, *_: object) -> None:
        if self._optimizer is not None:
            self._optimizer.accumulating -= 1


def plans(model: nn.Module) -> list[Plan]:
    """The plans made for ``model`` so far, one per input signature; for a model in parts, those of its parts.

    Empty before the first training call if there was no sample, and in online mode. Raises ``PlanError`` if the model
    is not rematerialized.
    """
    return _planned(model).plans()


def wait(model: nn.Module, seconds: float | None = None) -> bool:
    """Wait until the searches for better plans for ``model`` have ended, at most ``seconds``. Returns whether they have
    ended.

    Found plans are used from then on, see ``plans`` and ``Plan.history``. Raises ``PlanError`` if the model is not
    rematerialized, or ``seconds`` is not a number.
    """
    planned = _planned(model)
    if seconds is not None and not is_number(seconds):
        raise PlanError(f"seconds is {seconds!r}, but is a number, such as 5.0, or None.")
    return planned.wait(seconds)


def plan(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget: int | str,
    planner: str = "auto",
    seed: int = 0,
    offload: str | None = None,
    offload_budget: int | str | None = None,
    chunked_loss: bool = False,
    on_progress: Progress | None = None,
) -> Plan:
    """Plan the training pass of ``model(*args, **kwargs)`` without changing the model.

    The arguments are those of ``rematerialize``, and so are the errors. A model on the ``meta`` device is planned with
    analytical costs. ``on_progress(stage, fraction)`` is called along the way; without it, a terminal or a notebook
    shows a bar.
    """
    if is_inside():
        raise PlanError(
            "a plan is made outside of lowtide.online; inside, whatever runs is kept within the budget as it comes."
        )
    require_module(model, "plan")
    given: dict[str, Any] = {"offload": offload, "offload_budget": offload_budget, "chunked_loss": chunked_loss}
    settings = Settings(budget=budget, planner=planner, seed=seed, **given)
    with told(type(model).__name__, on_progress) as tell:
        with torch.enable_grad():
            terms_from = len(model_state(model).tensors)  # as in ``rematerialize``
            args, kwargs = hooked(model, args, {} if kwargs is None else kwargs)
            program = pipeline.captured_program(model, args, kwargs, settings, terms_from=terms_from).program

        def planned(settings: Settings) -> Plan:
            return pipeline.make_program_plan(program, settings, model, tell)

        owner = with_own_tangents(program)
        if owner is program or not is_worth_owning(program, settings, planned):
            return planned(settings)
        return pipeline.make_program_plan(owner, settings, model, tell)


def _planned(model: nn.Module) -> Rematerialized:
    """The planned forward of ``model``. Raises ``PlanError`` if it has none."""
    require_module(model, "lowtide")
    runtime = runtime_of(model)
    if runtime is None:
        raise PlanError("the model is not rematerialized.")
    return runtime


def runtime_of(model: nn.Module) -> Rematerialized | None:
    """The planned forward of ``model``, if it has one."""
    planned: Rematerialized | None = planned_forward(model)
    return None if planned is None or planned.is_copied_in(model) else planned
