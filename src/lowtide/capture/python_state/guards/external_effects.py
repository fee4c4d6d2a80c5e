"""What a pass leaves outside the model: in global variables, class attributes, lists, dictionaries and objects that the
code of its modules, or forward hooks of submodules, can name, or that are among its arguments.

A planned call does not run that code, so it would not leave anything there, and what the trace leaves is fake tensors
that the user cannot use. Only constants are no loss: a table that the first call puts into a cache is put there while
it is traced, with its values. Attributes of the model itself are handled in ``attribute_effects``.
"""

from __future__ import annotations

import contextlib
import copy
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.capture.python_state.code.code_names import full_name, is_trusted
from lowtide.capture.python_state.guards.reach import CODE, Holder, Reach, items_of
from lowtide.errors import CaptureError
from lowtide.objects import structure
from lowtide.objects.walk import refill

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
ARGUMENT = "an argument"
Constant = Callable[[torch.Tensor], torch.Tensor | None]


def hooks_of(module: nn.Module) -> tuple[Any, ...]:
    """All forward and backward hooks of a module, with whether they take keyword arguments, and the module's own
    ``forward`` if it has one (not a planned one, but the one that it replaces)."""
    own = module.__dict__
    forward: Any = own.get("forward")
    while getattr(type(forward), "_lowtide_runtime", False):
        forward = forward.original_forward if forward.had_instance_forward else None
    filled = [(own[name], own.get(f"{name}_with_kwargs", ())) for name in HOOKS if own[name]]
    return (*(part for hooks, flags in filled for key, hook in hooks.items() for part in (hook, key in flags)), forward)


def hooks_in(model: nn.Module) -> list[tuple[Any, ...]]:
    """The hooks of each of the model's modules."""
    return [hooks_of(module) for module in model.modules()]


WHAT_TO_DO = (
    "Where its first call does so alone, call the model once before it is rematerialized; otherwise do it outside of the "
    "forward pass, or run the model under lowtide.online."
)


def refuse_arguments() -> NoReturn:
    """Raise ``CaptureError`` for writes into arguments that planned calls do not make."""
    raise CaptureError(
        "the forward pass adds to a list, a dict or an object among its arguments, or counts in it (or does so at a "
        "parameter), which planned calls would not do. Return what it adds, or run the model under lowtide.online."
    )


@contextlib.contextmanager
def hooks_kept(model: nn.Module) -> Iterator[None]:
    """A context that raises ``CaptureError`` if code inside adds or removes hooks of the ``model``, and restores the
    hooks. The handle of a hook knows the module that it was made for, but no copy of it."""
    before = [(each.__dict__[name], copy.copy(each.__dict__[name])) for each in model.modules() for name in HOOKS]
    changed = []
    try:
        yield
    finally:
        changed += [(hooks, then) for hooks, then in before if [*hooks.items()] != [*then.items()]]
        for hooks, then in changed:
            refill(hooks, then)
    if changed:
        raise CaptureError(
            f"the forward pass removes hooks of its modules, or adds some, which planned calls would not do. {WHAT_TO_DO}"
        )


class ExternalEffects(Reach):
    """A context in which ``model`` runs. Afterwards everything outside the model that its hooks can reach is as before,
    and so is everything that its code can reach and put tensors into. ``lost``: names of these places. ``filled``:
    places where constants stay. ``arguments``: all arguments of the call; attributes of parameters and buffers are
    treated like them.

    ``constant`` gives the real tensor for a traced one that is constant. If code put only such tensors into a place,
    the real ones stay there. Other changes are left as they are: a library may have been imported meanwhile, whose
    state lies in more places than these.
    """

    def __init__(self, model: nn.Module, arguments: Iterable[Any], constant: Constant | None = None) -> None:
        super().__init__(map(id, model.modules()))
        self._constant = constant
        self.filled: list[Holder] = []
        self.lost: list[str] = []
        modules = [*model.modules()]
        for module in modules[1:]:
            hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
            self.add((hook, full_name(hook)) for hook in hooks if not is_trusted(hook))
        marks = (vars(tensor) for tensor in (*model.parameters(), *model.buffers()))
        put_on = [one for each in marks for one in each.values() if not isinstance(one, TorchDispatchMode)]  # of a fake
        self.add((value, ARGUMENT) for value in (*arguments, *put_on))
        kinds = dict.fromkeys(kind for module in modules for kind in type(module).__mro__)
        own = [(type(module), item) for module in modules for item in module.__dict__.items()]
        code = [(kind, item) for kind, item in own if isinstance(item[1], (*CODE, types.BuiltinMethodType))]
        self.add(
            [(value, f"{full_name(kind)}.{name}") for kind, (name, value) in code]
            + [(kind, full_name(kind)) for kind in kinds]
        )

    def __enter__(self) -> ExternalEffects:
        return self

    def __exit__(self, *error: object) -> None:
        for holder, now in self._changes():
            left = self._left(holder, now)
            if left is None:
                holder.write(holder.then)
            elif left:
                holder.write(_exchanged(now, left))
                self.filled.append(holder)

    def forget_arguments(self) -> None:
        """Release the contents of the arguments."""
        self._holders = {key: one for key, one in self._holders.items() if one.name != ARGUMENT}

    def undo(self) -> None:
        """Also take away what was left."""
        for holder in self.filled:
            holder.write(holder.then)

    def refuse(self) -> NoReturn:
        """Raise ``CaptureError`` for the places that are ``lost``."""
        if ARGUMENT in self.lost:
            refuse_arguments()
        raise CaptureError(
            f"the forward pass, or a hook of a submodule, keeps tensors outside of the model ({', '.join(self.lost)}), where "
            "planned calls would not put them. Return them from forward, keep them in an attribute of the module "
            "(module.kept = output), remove the hook, or run the model under lowtide.online. Where only the first call keeps "
            "something (a cache that depends on parameters or buffers), call the model once before it is rematerialized."
        )

    def _left(self, holder: Holder, now: Any) -> dict[int, Any] | None:
        """What replaces the added objects that contain tensors, by id: the same objects with real tensors, or ``None``
        if they must go."""
        left = {}
        constant = None if holder.name == ARGUMENT else self._constant
        must_go = holder.name == ARGUMENT and holder.has_other_values(now)
        for item in holder.added(now):
            traced, tree = structure.flatten(item)
            real = [constant(tensor) if constant else None for tensor in traced]
            must_go = must_go or any(tensor is None for tensor in real)
            if traced and not must_go:
                left[id(item)] = structure.unflatten(tree, real)
        if must_go and holder.changed(now) not in self.lost:
            self.lost.append(holder.changed(now))
        return None if must_go else left


def _exchanged(held: Any, others: dict[int, Any]) -> Any:
    items = [others.get(id(item), item) for item in items_of(held)]
    return dict(zip(held, items, strict=True)) if isinstance(held, dict) else items
