"""Capture: trace a model on fake tensors and convert the joint graph.

``capture`` runs the model's Python once or twice on fake tensors. It executes no operator on real activations, allocates
nothing of the model's size, and changes nothing of the user's.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec

import torch
from torch import nn
from torch._functorch._aot_autograd import descriptors as d
from torch._functorch._aot_autograd.schemas import OutputType
from torch._subclasses.fake_tensor import FakeTensor

from lowtide.capture import attributes, structure
from lowtide.capture.autocast import is_kept, share_casts
from lowtide.capture.convert import Converted, convert
from lowtide.capture.draws import Recorder
from lowtide.capture.fake import AnsweringFakeMode, fakes_of
from lowtide.capture.followed import Followed, follow_places, holding
from lowtide.capture.guards import Guards, Outer, outer_variables
from lowtide.capture.joint import export_joint
from lowtide.capture.module import (
    NO_SAVED_TENSORS_HOOKS,
    State,
    TracedModel,
    WriteError,
    announce_origins,
    copy_without_data,
    model_state,
    period_of_casts,
)
from lowtide.capture.overwrites import with_overwrites
from lowtide.capture.places import Place, of_modules, sharing, tensors_in
from lowtide.capture.program import Conditions, Program
from lowtide.capture.rehearsal import Effects, rehearse
from lowtide.capture.results import GradientMask, Result
from lowtide.capture.sharded import refuse_sharded_parts
from lowtide.errors import CaptureError, LowtideError, NoGradientError, PlanError
from lowtide.ir import Graph
from lowtide.ir.graph import TANGENT_TARGET

_MEANINGS = {  # what PyTorch says, in words that help
    "data is not allocated yet": "an operator reads the values of a tensor, which there are none of yet (F.ctc_loss does where "
    "lengths are given as lists: pass tensors; recurrent layers do with packed sequences: pass padded ones)",
    "use_reentrant=True": NO_SAVED_TENSORS_HOOKS,
}
_WRITES = (  # what PyTorch says of writes into a tensor that is no argument of the program
    "mutating a non-functional tensor with a functional tensor",
    "aot_autograd expected to have an entirely functional graph",
)


def flat_arguments(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> tuple[list[torch.Tensor], Any]:
    """The call's distinct tensors and the structure that rebuilds ``(args, kwargs)`` from them."""
    if isinstance(args, (torch.Tensor, str)) or not isinstance(args, Sequence):
        raise PlanError(
            f"args is a {type(args).__name__}, but stands for all positional arguments of the model: give a tuple, say (x,)."
        )
    if not isinstance(kwargs, Mapping | None):
        raise PlanError(f"kwargs is a {type(kwargs).__name__}, not a dictionary of the model's keyword arguments.")
    return structure.flatten_distinct((tuple(args), dict(kwargs or {})))


_Parameters = ParamSpec("_Parameters")
_LOCK = threading.RLock()  # tracing changes PyTorch's state, and Python's generators, for the whole process


def _one_at_a_time(function: Callable[_Parameters, Program]) -> Callable[_Parameters, Program]:
    @functools.wraps(function)
    def locked(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> Program:
        with _LOCK:
            return function(*args, **kwargs)

    return locked


@_one_at_a_time
def capture(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mask: GradientMask | None = None,
    rewrite: Callable[[torch.fx.GraphModule], None] | None = None,
    watch: Callable[[nn.Module], None] | None = None,
    effects: Effects | None = None,
    follow: frozenset[Place] | Followed = frozenset(),
    recorder: Recorder | None = None,
) -> Program:
    """The training program of ``model(*args, **kwargs)``.

    ``mask`` tells for which tensors of the result a gradient will come back, and in which layout; by default it is
    guessed, see ``capture.module.guess_mask``. ``watch`` is shown every copy of the model before it is traced; ``rewrite``
    may change the joint graph before it is converted. ``effects`` is what it does to attributes, where that is known.
    ``follow`` are attributes whose tensors are inputs of the program instead of constants, more of which may be found; or just
    those of another program of the same call, in their order.
    ``recorder`` says in which state the generators of Python and NumPy are; by default, in that of now.

    Raises ``CaptureError`` where the program depends on data in a way that cannot be answered before it runs, or uses
    something unsupported.
    """
    state = model_state(model)
    tensors, arguments = flat_arguments(args, kwargs)
    _check(model, state, tensors)
    mode = AnsweringFakeMode()
    held, followed = _followed(model, follow, (*state.tensors, *tensors))
    places = follow.attributes() if isinstance(follow, Followed) else follow
    fakes = fakes_of(mode, state.tensors, (*tensors, *held))
    recorder = recorder or Recorder()
    again = functools.partial(
        capture, model, args, kwargs, mask=mask, rewrite=rewrite, watch=watch, follow=follow, recorder=recorder
    )
    real = (*state.tensors, *held)
    outer = outer_variables(model)

    def make_model(own: Sequence[torch.Tensor]) -> nn.Module:
        clone = copy_without_data(model, real, own)
        announce_origins(clone)
        if watch is not None:
            watch(clone)
        return clone

    assigned = effects.tensors if effects else ()
    keep_casts = torch.is_autocast_cache_enabled()  # the tracer switches that off
    traced = TracedModel(make_model, state.names, arguments, len(tensors), mask, assigned, recorder, keep_casts)
    try:
        module, metadata = export_joint(traced, fakes)
        if len(metadata.input_info) != len(fakes):  # merged into one
            raise CaptureError(
                "the forward pass writes into memory that several buffers or arguments share (a view of a buffer that is a "
                "buffer itself, say), which a plan cannot follow. Form the view in the forward pass, pass a copy, or run it "
                "under lowtide.online."
            )
        if effects is None:
            effects = rehearse(model, state.tensors, held, tensors, arguments) if traced.changes else Effects()
            if effects.tensors or effects.carried:
                return again(effects=effects, follow=places | effects.carried)
    except Exception as error:
        if recorder.used_otherwise(failed=True):
            return again(effects=effects)
        written = _written(model, error) - places
        if written:
            return again(effects=effects, follow=places | written)
        if isinstance(error, LowtideError):
            raise
        raise _capture_error(error) from error
    if recorder.used_otherwise(failed=False):
        return again(effects=effects)
    if all(entry is False for entry in traced.used_mask):
        raise NoGradientError(
            "no output of the model requires a gradient, so there is nothing to rematerialize: check requires_grad of "
            "the parameters and inputs, and that the model is not under torch.no_grad()."
        )
    inputs = (*state.tensors, *tensors, *held)
    share_casts(module, [i for i, tensor in enumerate(inputs) if is_kept(tensor)], period_of_casts)
    if rewrite is not None:
        rewrite(module)
    settings = tuple(setting for setting in traced.settings if setting.place not in effects.counted)
    attributes.say_unknown(model, [place for place in traced.unknown if place not in effects.counted])
    guards = _guards(model, traced, effects, settings, held, outer)
    conditions = Conditions(tuple(mode.questions), guards, recorder.draws)
    program = _assemble(convert(module), metadata, traced, conditions, state, type(model).__name__)
    read = _read_inputs(program)
    count = len(state.tensors) + len(tensors)
    followed = Followed(followed.places, frozenset(i for i in range(len(held)) if count + i not in read))
    conditions = dataclasses.replace(conditions, followed=followed)
    return dataclasses.replace(program, effects=effects, settings=settings, conditions=conditions)


def _followed(
    model: nn.Module, follow: frozenset[Place] | Followed, state: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], Followed]:
    if not isinstance(follow, Followed):
        return follow_places(model, follow, state)
    held = follow.behind([], model)
    if held is None:
        raise CaptureError("tensors in the model's attributes are not where they were when it was called.")
    return held, follow


def _written(model: nn.Module, error: Exception) -> frozenset[Place]:
    """The attributes into whose tensors the forward pass writes."""
    if isinstance(error, WriteError):
        return holding(model, error.tensor)
    if any(text in str(error) for text in _WRITES):
        return frozenset(place for place, value in of_modules(model) if tensors_in(value))  # of one of them, a part
    return frozenset()


def _read_inputs(program: Program) -> set[int]:
    """The flat inputs that are of consequence: for operators, results, or answers."""
    asked = (question.positions() for question in program.conditions.questions)
    returned = {result.argument for result in program.results if result.argument is not None}
    return {i for i, value in enumerate(program.inputs) if value is not None} | returned.union(*asked)


def _guards(
    model: nn.Module,
    traced: TracedModel,
    effects: Effects,
    settings: Sequence[attributes.Setting],
    held: Sequence[torch.Tensor],
    outer: Outer,
) -> tuple[Guards, ...]:
    """What the model must be like: as it is now or, where the next call has the same program, as this one leaves it."""
    written = [one.place for one in effects.tensors if not one.once and one.place not in effects.carried]
    every = sharing(model, written)
    guards = Guards.of(model, traced.read, every, held, outer=outer)
    left = [(setting.place, setting.value) for setting in settings if setting.place in traced.changes.plain]
    if not left or not effects.settled:
        return (guards,)
    return guards, Guards.of(model, traced.read, every, held, left, outer)


def _check(model: nn.Module, state: State, tensors: Sequence[torch.Tensor]) -> None:
    devices = {
        tensor.device for tensor in (*state.tensors, *tensors) if tensor.dim() > 0 or tensor.device.type != "cpu"
    }
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise CaptureError(
            f"the model and its inputs lie on {len(devices)} devices ({names}); move them to one device."
        )
    refuse_sharded_parts(model)
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise CaptureError(
                f"module {name or type(model).__name__!r} has sparse gradients (sparse=True), which a plan cannot hold. Create "
                "it with sparse=False, or run the model under lowtide.online."
            )
        if module.__dict__.get("gradient_checkpointing"):
            raise CaptureError(
                f"activation checkpointing is switched on in module {name or type(model).__name__!r}, and a plan decides "
                "itself what is computed again. Switch it off: gradient_checkpointing=False or activation_checkpointing=False "
                "in the trainer's arguments, model.gradient_checkpointing_disable() or model.disable_gradient_checkpointing()."
            )
        if name and (module._backward_hooks or module._backward_pre_hooks):
            raise CaptureError(
                f"submodule {name!r} has backward hooks, which a planned backward pass cannot call. Put them on the model "
                "itself, use Tensor.register_hook on parameters, or remove them."
            )
    for tensor in (*state.tensors, *tensors):
        if tensor.layout is not torch.strided or type(tensor) not in (
            torch.Tensor,
            nn.Parameter,
            nn.Buffer,
            FakeTensor,
        ):
            raise CaptureError(
                f"a {type(tensor).__name__} of layout {tensor.layout} cannot be captured; only dense plain tensors can."
            )


def _capture_error(error: Exception) -> CaptureError:
    source = ""
    frame = error.__traceback__
    from lowtide.capture.source import is_user_file

    while frame is not None:
        if is_user_file(frame.tb_frame.f_code.co_filename):
            source = f"{frame.tb_frame.f_code.co_filename}:{frame.tb_lineno}"
        frame = frame.tb_next
    place = f" at {source}" if source else ""
    if isinstance(error, WriteError) or any(text in str(error) for text in _WRITES):
        return CaptureError(
            f"the forward pass writes in place{place} into a tensor that is no parameter, no buffer and in no attribute "
            "of the model, which a plan cannot follow. Register it: self.register_buffer(name, tensor).",
            source=source,
        )
    summary = str(error).strip().split("\n")[0].rstrip(".")
    summary = next((meaning for text, meaning in _MEANINGS.items() if text in summary), summary)
    return CaptureError(
        f"the program cannot be captured as one graph{place}: {type(error).__name__}: {summary}. Where model(*args, **kwargs) "
        "fails alone too, correct the model or the sample; where the program depends on the data, run it under lowtide.online.",
        source=source,
    )


def _assemble(
    converted: Converted,
    metadata: Any,
    traced: TracedModel,
    conditions: Conditions,
    state: State,
    name: str,
) -> Program:
    builder = converted.builder
    returned, position, results = _results(converted, metadata, traced)
    position_of: dict[Any, int] = {d.PlainAOTInput(i): i for i in range(len(converted.inputs))}
    gradients = tuple(
        (position_of[desc.grad_of], value)
        for desc, value in converted.outputs.items()
        if isinstance(desc, d.GradAOTOutput)
    )
    if not all(desc in position for desc in converted.tangent_outputs):
        raise CaptureError(
            "the forward pass writes in place into an argument or a parameter that requires a gradient (F.relu_, clamp_ or "
            "Embedding(max_norm=...), say), which a plan cannot follow. Write into a copy, outside the forward pass, or run it "
            "under lowtide.online."
        )
    tangents = tuple(position[desc] for desc in converted.tangent_outputs)
    arriving = [op.outputs[0] for op in builder.ops if op.target == TANGENT_TARGET]
    read = {value for op in builder.ops for value in op.inputs} | set(returned)
    graph = Graph(
        name=name,
        ops=tuple(builder.ops),
        values=tuple(builder.values),
        storages=builder.storages(),
        inputs=tuple(value.id for value in builder.values if value.producer is None),
        forward_outputs=(*returned, *converted.kept.values()),
        # The caller may hold the gradients it hands in (``loss.backward()`` does): they count to the end.
        outputs=tuple(dict.fromkeys((*arriving, *(value for _, value in gradients)))),
        forward_ops=converted.forward_ops,
    )
    program = Program(
        graph=graph,
        calls=tuple(builder.calls),
        metas=tuple(builder.metas),
        inputs=tuple(value if value in read else None for value in converted.inputs),
        constants=converted.constants,
        tangents=tangents,
        gradients=gradients,
        results=tuple(results),
        result_structure=traced.result,
        mask=traced.used_mask,
        reassigned=traced.reassigned,
        conditions=conditions,
        state_names=state.names,
        parameters=state.parameters,
        kept=tuple(converted.kept),
    )
    return with_overwrites(program)


def _results(
    converted: Converted, metadata: Any, traced: TracedModel
) -> tuple[list[int], dict[Any, int], list[Result]]:
    """Forward outputs in the order in which the program returns them, at which of them each described one is, and how each
    result comes from them. Those with a gradient are apart from all others."""
    returned: list[int] = []
    positions: dict[Any, int] = {}
    requires_grad = [*traced.requires_grad, *(False for _ in traced.reassigned)]
    results = []
    for number, (grad, viewed) in enumerate(zip(requires_grad, traced.viewed, strict=True)):
        descriptor, info = d.PlainAOTOutput(number), metadata.output_info[number]
        if info.output_type in (OutputType.is_input, OutputType.alias_of_input):
            view = viewed.view if info.output_type is OutputType.alias_of_input else None
            results.append(Result(grad, argument=info.base_idx, view=view))
            continue
        value = converted.outputs[descriptor]
        if grad or value not in returned:
            returned.append(value)
            positions[descriptor] = len(returned) - 1
        place = positions.get(descriptor, returned.index(value))
        results.append(Result(grad, place, viewed.argument, view=viewed.view))
    bases = [None if viewed.result is None else results[viewed.result].returned for viewed in traced.viewed]
    return returned, positions, [dataclasses.replace(one, base=base) for one, base in zip(results, bases, strict=True)]
