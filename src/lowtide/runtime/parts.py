"""A model that is no single program, run in parts: each largest submodule that can be captured runs by a plan of its own.

The model's own code runs as it is. While it does, every submodule that is called is tried: where it can be captured it is a
part, where it cannot its own code runs too, and the submodules inside of it are tried in turn. So decisions that depend on
data lie between parts, in code that runs once, and are never computed again. All parts share one budget with what lies between
them, see ``runtime.shared``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lowtide.capture.copies import model_state
from lowtide.capture.python_state.paths import named
from lowtide.capture.sharded import is_sharded
from lowtide.errors import CaptureError, NoGradientError
from lowtide.pipeline import state_bytes
from lowtide.runtime.forward_pass import ForwardPass
from lowtide.runtime.outside import OutsideWatch
from lowtide.runtime.recomputed import recomputed
from lowtide.runtime.shared import SharedBudget
from lowtide.runtime.sharing_forward import SharingForward
from lowtide.settings import Settings

_LOG = logging.getLogger(__name__)
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict, torch.jit.ScriptModule)


class Part(SharingForward):
    """A submodule that is tried as a part. ``outside``: why it is none, once that is known (empty where it has no gradient);
    ``runs_again``: whether its own code, with all that is in it, runs again in the backward pass."""

    def __init__(self, module: nn.Module, parts: Parts, name: str) -> None:
        super().__init__(module, parts.shared)
        self.parts = parts
        self.name = name
        self.outside: str | None = None
        self.runs_again = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or not self.parts.running or _saves_otherwise():
            return self.original_forward(*args, **kwargs)
        if self.outside is None:
            with self.parts.lifted(self.model):
                try:
                    return super().__call__(*args, **kwargs)
                except NoGradientError:
                    self.outside = ""
                except CaptureError as error:
                    self.outside = str(error)  # alone: its traceback holds tensors
                    _LOG.info("%s runs as it is, its submodules are tried as parts: %s", self.name, error)
                self.shared.go_on()
        if self.runs_again:
            with self.parts.paused():
                return recomputed(self.model, self.original_forward, args, kwargs, self.shared.in_backward)
        with self.parts.watch.call(self.name, (args, kwargs)):
            return self.original_forward(*args, **kwargs)

    def _is_trained(self) -> bool:
        return True


class Parts:
    """The parts of one model. ``why`` the model as a whole is none. Raises that where it has no submodules to try."""

    def __init__(self, model: nn.Module, settings: Settings, why: CaptureError) -> None:
        if any(map(is_sharded, model.modules())) or not any(map(_is_tried, list(model.modules())[1:])):
            raise why
        self.why = str(why)
        # What runs in one process need not run in another, so none may wait for another's plan.
        self.shared = SharedBudget(dataclasses.replace(settings, agreed=False), "parts")
        if settings.total_budget is not None:
            self.shared.resident_bytes = state_bytes(model)
        self._model = weakref.ref(model)
        self._parts: weakref.WeakKeyDictionary[nn.Module, Part] = weakref.WeakKeyDictionary()
        self.watch = OutsideWatch(self.shared)
        self.shared.give_way, self.shared.expected = self._run_more_again, self._with_siblings
        self._calls = self._steps = 0
        self._paused = False
        _LOG.warning(
            "%s cannot be one program, so its submodules are planned, and code between them runs as it is: %s",
            type(model).__name__, why,
        )  # fmt: skip

    @property
    def running(self) -> bool:
        """Whether a call of the model is under way."""
        return self._calls > 0 and not self._paused

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, no submodule is a part."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def _run_more_again(self, missing_bytes: int) -> bool:
        """The plans of the parts do not fit: have further submodules that are no parts run again; whether there are any."""
        chosen = self.watch.to_run_again(missing_bytes)
        for part in self._parts.values():
            part.runs_again = part.runs_again or part.name in chosen
        if chosen:
            _LOG.warning(
                "plans alone do not meet the budget: from the next step on, %s run again in the backward pass",
                named(chosen),
            )
        return bool(chosen)

    def _with_siblings(self, passes: list[ForwardPass]) -> list[ForwardPass]:
        """With passes of modules that have not run yet, such as dropped layers: as those of their kind in the same list."""
        model = self._model()
        assert model is not None
        order = {id(part): (number, part) for number, part in enumerate(self._in_order(model))}
        met = {one.graph: one for one in passes}
        like = {
            (type(one.graph.model), _list_of(one.graph.name)): one
            for one in met.values()
            if isinstance(one.graph, Part)
        }
        missing = [
            part for _, part in order.values() if part not in met and part.outside is None and not part.runs_again
        ]
        found = list(passes)
        for part in missing:
            sibling = like.get((type(part.model), _list_of(part.name)))
            if sibling is not None and _list_of(part.name):
                number = order[id(part)][0]
                after = [i for i, one in enumerate(found) if order.get(id(one.graph), (number,))[0] < number]
                one = dataclasses.replace(sibling, key=(id(part), 0), call=_gone())
                found.insert(after[-1] + 1 if after else 0, one)
        return found

    def _in_order(self, model: nn.Module) -> Iterator[Part]:
        return (self._parts[module] for _, module in model.named_modules() if module in self._parts)

    def planned(self) -> list[Part]:
        """Those that run by plans."""
        return [part for part in self._parts.values() if part.entries]

    def outside(self) -> dict[str, str]:
        """Names of submodules that are no part, and why."""
        return {part.name: part.outside for part in self._parts.values() if part.outside}

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, submodules run as parts where they can: a call of the model."""
        if self._calls:  # the model calls itself
            yield
            return
        model = self._model()
        assert model is not None
        self._steps += 1
        if self._steps == 2 and not self.planned():
            _LOG.warning(
                "nothing of %s could be planned: it runs as without lowtide, whatever the budget. lowtide.online takes any "
                'program; on_capture_error="online" puts the model there.',
                type(model).__name__,
            )
        modules = [(name, module) for name, module in model.named_modules() if name and _is_tried(module)]
        for name, module in modules:
            part = self._parts.get(module)
            if part is None or part.original_forward != module.forward:  # or its code has been replaced since
                self._parts[module] = part = Part(module, self, name)
                # Whoever calls the module again, or reads its weights, adds to their gradients.
                part.read_elsewhere = frozenset(map(id, module.parameters()))
        self._calls += 1
        try:
            with self.shared.call(_device(model)), self._put(modules):
                yield
            self.watch.end()
        finally:
            self._calls -= 1

    @contextlib.contextmanager
    def _put(self, modules: list[tuple[str, nn.Module]]) -> Iterator[None]:
        put = []
        try:
            for _, module in modules:
                put.append((module, module.__dict__.get("forward")))
                module.__dict__["forward"] = self._parts[module]
            yield
        finally:
            for module, before in put:
                _set(module, before)

    @contextlib.contextmanager
    def lifted(self, part: nn.Module) -> Iterator[None]:
        """Inside, the submodules of a part are as they are outside of calls."""
        lifted: list[tuple[nn.Module, Part]] = []
        for module in part.modules():
            own = module.__dict__.get("forward")
            if module is not part and isinstance(own, Part) and own.parts is self:
                lifted.append((module, own))
                _set(module, own.original_forward if own.had_instance_forward else None)
        try:
            yield
        finally:
            for module, own in lifted:
                module.__dict__["forward"] = own


def _saves_otherwise() -> bool:
    """Whether code between parts checkpoints or packs what is saved: it runs again without parts, as it must have run then."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _list_of(name: str) -> str:
    """The list that a module is in by its name, empty where it is in none."""
    parent, _, last = name.rpartition(".")
    return parent if last.isdigit() else ""


def _gone() -> weakref.ref[Any]:
    """A reference to nothing."""
    return weakref.ref(type("Gone", (), {})())


def _set(module: nn.Module, forward: Any) -> None:
    if forward is None:
        module.__dict__.pop("forward", None)
    else:
        module.__dict__["forward"] = forward


def _is_tried(module: nn.Module) -> bool:
    """Whether a plan for the module alone could free anything: not for single operators, as PyTorch's own layers are."""
    if isinstance(module, _CONTAINERS):
        return False
    return any(True for _ in module.children()) or not type(module).__module__.startswith("torch.nn.modules.")


def _device(model: nn.Module) -> torch.device:
    tensors = model_state(model).tensors
    return next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), torch.device("cpu"))
