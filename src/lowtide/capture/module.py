"""The model as a function of tensors alone, made for tracing.

Tracing must change nothing of the user's, and a model's forward may write attributes. So the traced model is a deep copy
of the module tree in which every parameter and buffer is a fake tensor; real data are never copied. Tied parameters are
one input, so that their gradients are summed by the autograd engine itself, in eager's order.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
import torch.utils._pytree as pytree
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.capture import attributes, draws, structure
from lowtide.capture.autocast import Period, periods_of_casts
from lowtide.capture.caches import clear_caches_of_fakes
from lowtide.capture.draws import Recorder
from lowtide.capture.fake import known_value
from lowtide.capture.followed import held_tensors
from lowtide.capture.guards import accesses
from lowtide.capture.outside import ARGUMENT, Reached, hooks_of
from lowtide.capture.places import Place
from lowtide.capture.registered import Registered, declared_buffers, new_buffers, registered
from lowtide.capture.results import GradientMask, Outputs, Viewed, bases, below
from lowtide.capture.sharded import copy_module
from lowtide.capture.source import user_source
from lowtide.errors import CaptureError

NO_SAVED_TENSORS_HOOKS = (
    "the model checkpoints or offloads activations by itself (torch.utils.checkpoint, saved_tensors_hooks), which a plan "
    "replaces: switch that off or, where the model is planned in a call that is checkpointed itself, give rematerialize a "
    "sample"
)


@dataclass(frozen=True, slots=True)
class State:
    """A model's parameters and buffers, each once: ``names[i]`` lists every place where ``tensors[i]`` is registered."""

    tensors: tuple[torch.Tensor, ...]
    names: tuple[tuple[str, ...], ...]
    parameters: int  # tensors[:parameters] are parameters, the rest buffers


def model_state(model: nn.Module) -> State:
    """Parameters, then buffers, in registration order, without duplicates."""
    places: dict[int, tuple[torch.Tensor, list[str]]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        if is_lazy(tensor):
            raise CaptureError(
                f"parameter {name!r} has no shape yet: call the model once with a sample before it is rematerialized."
            )
        places.setdefault(id(tensor), (tensor, []))[1].append(name)
    parameters = len(places)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        places.setdefault(id(buffer), (buffer, []))[1].append(name)
    tensors = tuple(tensor for tensor, _ in places.values())
    return State(tensors, tuple(tuple(names) for _, names in places.values()), parameters)


def copy_without_data(model: nn.Module, state: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> nn.Module:
    """A deep copy of the module tree that holds ``others`` instead of the tensors ``state`` and shares all other tensors."""
    memo: dict[int, Any] = {id(real): other for real, other in zip(state, others, strict=True)}
    for tensor in held_tensors(model):
        memo.setdefault(id(tensor), tensor)
    memo.update({id(generator): generator for generator in draws.GENERATORS})  # behind random.uniform and the like
    memo.update(
        {id(value): value for m in model.modules() for value in vars(m).values() if isinstance(value, ModuleType)}
    )
    planned = planned_forward(model)
    if planned is None:
        return copy_module(model, memo)
    memo[id(planned)] = None
    clone = copy_module(model, memo)
    del clone.__dict__["forward"]
    if planned.had_instance_forward:
        clone.forward = copy.deepcopy(planned.original_forward, {**memo, id(model): clone})
    return clone


def planned_forward(model: nn.Module) -> Any:
    """The planned ``forward`` that a model was given, also below the wrappers of mixed precision; ``None`` without one."""
    forward: Any = model.__dict__.get("forward")
    while forward is not None and not getattr(forward, "_lowtide_runtime", False):
        forward = getattr(forward, "__func__", None) or getattr(forward, "__wrapped__", None)
    return forward


@dataclass
class TracedModel:
    """Callable as ``(*tensors) -> tuple of tensors``; remembers the structure of the last result. The tensors are the model's
    parameters and buffers, those of the arguments, and those in followed attributes.

    Every call runs a model of its own, since a forward pass may leave (fake) tensors in attributes: what it ``changes``. The
    structure is of a pair: what the model returned, and the attributes that are results too, ``assigned``. ``settings`` are the
    plain values that it wrote, and ``unknown`` the attributes that got other ones.

    ``mask`` says which results a gradient is expected for; the others are detached, so that none is asked for them. What the
    model reads of itself is ``read``, and ``recorder`` follows what it draws. ``keep_casts``: those of autocast.
    """

    make_model: Callable[[Sequence[torch.Tensor]], nn.Module]
    names: tuple[tuple[str, ...], ...]
    arguments: Any
    argument_tensors: int
    mask: GradientMask | None
    assigned: tuple[attributes.Assigned, ...] = ()
    recorder: Recorder = field(default_factory=Recorder)
    keep_casts: bool = True
    read: set[tuple[int, str]] = field(default_factory=set)
    reached: Reached | None = None  # of the first call
    changes: attributes.Changes = field(default_factory=attributes.Changes)
    settings: tuple[attributes.Setting, ...] = ()
    unknown: tuple[Place, ...] = ()
    result: Any = None
    requires_grad: tuple[bool, ...] = ()
    used_mask: GradientMask = ()
    reassigned: dict[str, Registered] = field(default_factory=dict)
    viewed: tuple[Viewed, ...] = ()

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        count = len(self.names)
        given = tensors[count : count + self.argument_tensors]
        model = self.make_model([*tensors[:count], *tensors[count + self.argument_tensors :]])
        declared = declared_buffers(model)
        before = attributes.snapshot(model)
        args, kwargs = structure.unflatten(self.arguments, given)
        hooks = [hooks_of(module) for module in model.modules()]
        wanting = [tensor.requires_grad for tensor in tensors]
        try:
            # Not ``model(...)``: hooks on the model itself run around the planned forward, at every call.
            no_hooks = torch.autograd.graph.disable_saved_tensors_hooks(NO_SAVED_TENSORS_HOOKS)
            with (
                self.recorder(),
                Reached(model, (*args, *kwargs.values()), _constant if self.reached is None else None) as reached,
                draws.none_by(model),
                accesses(model) as access,
                no_hooks,
                periods_of_casts(self.keep_casts) as period,
                _RecordSource(tensors[:count], period),
                _RefuseWrites(),  # type: ignore[no-untyped-call]
            ):
                result = model.forward(*args, **kwargs)
            self.read |= access.read
        finally:
            clear_caches_of_fakes()
        extra = new_buffers(model, self.names, tensors[:count])
        self.reached = self.reached or reached
        if reached.lost:
            self.reached.undo()
        if ARGUMENT in reached.lost:
            raise CaptureError(
                "the forward pass adds to a list, a dict or an object among its arguments, or counts in it, which planned "
                "calls would not do. Return what it adds instead, or run the model under lowtide.online."
            )
        if reached.lost:
            where = ", ".join(reached.lost)
            raise CaptureError(
                f"the forward pass, or a hook of a submodule, keeps tensors outside of the model ({where}), where planned "
                "calls would not put them. Return them from forward, keep them in an attribute of the module "
                "(module.kept = output), remove the hook, or run the model under lowtide.online. Where only the "
                "first call keeps something (a cache that depends on parameters or buffers), call the model once before it is "
                "rematerialized."
            )
        if [tensor.requires_grad for tensor in tensors] != wanting:
            raise CaptureError(
                "the forward pass calls requires_grad_() on an argument or a parameter, which planned calls would not do. Call "
                "it before the forward pass, or run the model under lowtide.online."
            )
        self.changes = attributes.changes(model, before)
        paths = [path for path, _ in model.named_modules()]
        written = [(paths[number], name) for number, name in sorted(access.written)]
        self.settings, self.unknown = attributes.settings(model, before, self.changes, written)
        if hooks != [hooks_of(module) for module in model.modules()]:
            self.settings = ()  # a flag says that there are hooks now, but in the model itself there are none
        flat, result = structure.flatten_distinct((result, attributes.written(model, before, self.assigned)))
        self.result = structure.with_given(result, structure.objects(self.arguments))
        hidden = bases(flat, tensors)
        guess = guess_mask(flat, self.result) + (False,) * len(hidden)
        flat += hidden
        self.requires_grad = tuple(tensor.requires_grad for tensor in flat)
        self.used_mask = self.mask if self.mask and _fits(self.mask, flat) else guess
        known = frozenset(name for names in self.names for name in names)
        self.reassigned = registered(model, extra, known, declared, len(flat))
        outputs = Outputs.of(
            [*flat, *(tensor.detach() for tensor in extra.values())], self.used_mask + (False,) * len(extra), tensors
        )
        self.viewed = outputs.viewed
        return outputs.tensors


def _constant(traced: torch.Tensor) -> torch.Tensor | None:
    """The real tensor, where it is one that eager's first call would have left."""
    real = None if traced.requires_grad else known_value(traced, constant=True)
    return real if real is not None and real.device == traced.device else None


def _fits(mask: GradientMask, results: Sequence[torch.Tensor]) -> bool:
    return len(mask) == len(results) and all(
        entry is False or (tensor.requires_grad and (entry is True or len(entry) == tensor.dim()))
        for entry, tensor in zip(mask, results, strict=True)
    )


def guess_mask(results: Sequence[torch.Tensor], result: structure.Nested) -> GradientMask:
    """Which results a gradient will come back for: the scalars where there are some, with the results that depend on parameters
    of which the scalars know nothing (a scalar may be a part of a loss outside), else all that can have one. What the model
    only left in attributes counts where it returned nothing of the kind.

    Only a guess. A backward pass that disagrees makes a program for what it really got.
    """
    returned = frozenset(structure.slots(result.leaves[0]))
    able = [index for index, tensor in enumerate(results) if tensor.requires_grad]
    inner = [index for index in able if index in returned]
    chosen = [index for index in inner if results[index].numel() == 1]
    carried = structure.held_slots(result)
    if chosen:
        known = below([results[index] for index in chosen])
        chosen += [index for index in inner if index not in carried and _has_leaf(below([results[index]], known))]
    else:
        chosen = [index for index in inner if index not in carried] or inner or able
    return tuple(index in chosen for index in range(len(results)))


def _has_leaf(nodes: Collection[Any]) -> bool:
    """Whether there is a parameter or an input among them."""
    return any(not node.next_functions for node in nodes)


def announce_origins(model: nn.Module) -> None:
    """Make every module of a (copied) tree note its path for the tracer while it runs, see ``origin``."""
    path: list[str] = []

    def enter(name: str, module: nn.Module, args: Any) -> None:
        path.append(name)
        _note(module=name)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if path:
            path.pop()
        _note(module=path[-1] if path else "")

    for name, module in model.named_modules():
        module.register_forward_pre_hook(functools.partial(enter, name), prepend=True)
        module.register_forward_hook(leave, always_call=True)


def origin(node: torch.fx.Node) -> tuple[str, str]:
    """Module path and ``file:line`` that were current when a forward node was traced."""
    noted = node.meta.get("custom", {}).get(_KEY, {})
    return noted.get("module", ""), noted.get("source", "")


def period_of_casts(node: torch.fx.Node) -> str:
    """Until when a cast was kept, see ``capture.autocast``."""
    period: str = node.meta.get("custom", {}).get(_KEY, {}).get("casts", "")
    return period


_KEY = "lowtide"  # inside the one annotation that the tracer copies to nodes


def _note(**changes: str) -> None:
    custom = fx_traceback.current_meta.get("custom", {})
    fx_traceback.current_meta["custom"] = {**custom, _KEY: {**custom.get(_KEY, {}), **changes}}


_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class _RecordSource(torch.overrides.TorchFunctionMode):
    """Notes the user's line at every call of a torch function, and the ``period`` of its casts. ``state``: what must not be
    given other data."""

    def __init__(self, state: Sequence[torch.Tensor], period: Period) -> None:
        super().__init__()
        self.state = state
        self.period = period

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _note(source=user_source(), casts=self.period(func, args, kwargs))
        if func == _SET_DATA and any(args[0] is tensor for tensor in self.state):
            raise CaptureError(
                "the forward pass assigns to .data of a parameter or a buffer, which no program can follow. Write into it "
                "(tensor.data.copy_(...), tensor.mul_(...) under torch.no_grad()), or assign outside the forward pass."
            )
        return func(*args, **(kwargs or {}))


class WriteError(Exception):
    """The forward pass writes into ``tensor``, which is a real one."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(f"a write into a tensor of shape {tuple(tensor.shape)}")
        self.tensor = tensor


class _RefuseWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, nothing is written into real tensors: they are the user's."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(function, torch._ops.OpOverload) and function._schema.is_mutable:
            arguments = enumerate(function._schema.arguments)
            written = [args[i] if i < len(args) else kwargs.get(one.name) for i, one in arguments if one.is_write]
            for leaf in pytree.tree_leaves(written):
                if isinstance(leaf, torch.Tensor) and not isinstance(leaf, (FakeTensor, FunctionalTensor)):
                    raise WriteError(leaf)
        return function(*args, **kwargs)
