"""The model as a function of tensors alone, made for tracing.

Tracing must change nothing of the user's, and a model's forward may write attributes. So the traced model is a deep copy
of the module tree in which every parameter and buffer is a fake tensor; real data are never copied. Tied parameters are
one input, so that their gradients are summed by the autograd engine itself, in eager's order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
import torch.utils._pytree as pytree
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.capture.python_state import attribute_effects, random_numbers
from lowtide.capture.python_state.buffer_effects import MadeBuffer, declared_buffers, new_buffers, registered
from lowtide.capture.python_state.caches import clear_caches_of_fakes
from lowtide.capture.python_state.external_effects import ExternalEffects, hooks_of
from lowtide.capture.python_state.observe import Observer, Reads
from lowtide.capture.python_state.paths import AttributePath
from lowtide.capture.python_state.random_numbers import RandomRecorder
from lowtide.capture.trace.autocast import Period, periods_of_casts
from lowtide.capture.trace.fake import known_value
from lowtide.errors import CaptureError
from lowtide.program import structure
from lowtide.program.results import GradientMask, Outputs, Viewed, bases, below
from lowtide.program.source import user_source

NO_SAVED_TENSORS_HOOKS = (
    "the model checkpoints or offloads activations by itself (torch.utils.checkpoint, saved_tensors_hooks), which a plan "
    "replaces: switch that off or, where the model is planned in a call that is checkpointed itself, give rematerialize a "
    "sample"
)


@dataclass
class TracedModel:
    """Callable as ``(*tensors) -> tuple of tensors``; remembers the structure of the last result. The tensors are the model's
    parameters and buffers, those of the arguments, and those in followed attributes.

    Every call runs a model of its own, since a forward pass may leave (fake) tensors in attributes: what it ``changes``. The
    structure is of a pair: what the model returned, and the attributes that are results too, ``assigned``. ``settings`` are the
    plain values that it wrote, and ``unknown`` the attributes that got other ones.

    ``mask`` says which results a gradient is expected for; the others are detached, so that none is asked for them. What its
    code reads are the ``reads``, and ``recorder`` follows what it draws. ``keep_casts``: those of autocast.
    """

    original: nn.Module
    make_model: Callable[[Sequence[torch.Tensor]], tuple[nn.Module, dict[int, Any]]]
    names: tuple[tuple[str, ...], ...]
    arguments: Any
    argument_tensors: int
    mask: GradientMask | None
    assigned: tuple[attribute_effects.TensorEffect, ...] = ()
    recorder: RandomRecorder = field(default_factory=RandomRecorder)
    keep_casts: bool = True
    reads: Reads = field(default_factory=Reads)
    reached: ExternalEffects | None = None  # of the first call
    changes: attribute_effects.Changes = field(default_factory=attribute_effects.Changes)
    settings: tuple[attribute_effects.ValueEffect, ...] = ()
    unknown: tuple[AttributePath, ...] = ()
    result: Any = None
    requires_grad: tuple[bool, ...] = ()
    used_mask: GradientMask = ()
    reassigned: dict[str, MadeBuffer] = field(default_factory=dict)
    viewed: tuple[Viewed, ...] = ()

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        count = len(self.names)
        given = tensors[count : count + self.argument_tensors]
        model, copies = self.make_model([*tensors[:count], *tensors[count + self.argument_tensors :]])
        declared = declared_buffers(model)
        before = attribute_effects.snapshot(model)
        args, kwargs = structure.unflatten(self.arguments, given)
        hooks = [hooks_of(module) for module in model.modules()]
        observer = Observer(self.original, model, copies, self.reads)
        wanting = [tensor.requires_grad for tensor in tensors]
        try:
            # Not ``model(...)``: hooks on the model itself run around the planned forward, at every call.
            no_hooks = torch.autograd.graph.disable_saved_tensors_hooks(NO_SAVED_TENSORS_HOOKS)
            with (
                self.recorder(),
                ExternalEffects(
                    model, (*args, *kwargs.values()), _constant if self.reached is None else None
                ) as reached,
                random_numbers.none_by(model),
                observer.watching(),
                no_hooks,
                periods_of_casts(self.keep_casts) as period,
                _RecordSource(tensors[:count], period),
                _RefuseWrites(),  # type: ignore[no-untyped-call]
            ):
                result = model.forward(*args, **kwargs)
        finally:
            clear_caches_of_fakes()
        extra = new_buffers(model, self.names, tensors[:count])
        self.reached = self.reached or reached
        if reached.lost:
            self.reached.undo()
            reached.refuse()
        if [tensor.requires_grad for tensor in tensors] != wanting:
            raise CaptureError(
                "the forward pass calls requires_grad_() on an argument or a parameter, which planned calls would not do. Call "
                "it before the forward pass, or run the model under lowtide.online."
            )
        self.changes = attribute_effects.changes(model, before)
        paths = {id(module): path for path, module in model.named_modules()}
        written = sorted((paths[key], name) for key, name in observer.written if key in paths)
        self.settings, self.unknown = attribute_effects.settings(model, before, self.changes, written)
        if hooks != [hooks_of(module) for module in model.modules()]:
            self.settings = ()  # a flag says that there are hooks now, but in the model itself there are none
        flat, result = structure.flatten_distinct((result, attribute_effects.written(model, before, self.assigned)))
        self.result = structure.with_argument_slots(result, structure.objects(self.arguments))
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
    carried = structure.slots_in_objects(result)
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
