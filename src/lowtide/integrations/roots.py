"""Find the modules that a program trains when they are called, to plan or watch an unchanged script.

A root is a module that is called in training mode with gradients enabled, has parameters that require one, and is not
inside the call of another root. It is found by its first call: inside ``Roots``, a function replaces
``nn.Module.__call__`` that checks three flags and changes nothing for other modules. Models get no hooks.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._dynamo import utils
from torch._dynamo.decorators import skip
from torch._dynamo.variables import nn_module
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils.weak import WeakIdKeyDictionary

from lowtide.api import restore, runtime_of
from lowtide.capture.trace.patches import replaced
from lowtide.errors import CaptureError, InfeasibleBudgetError, LowtideError
from lowtide.integrations.unplanned import made_of_without_plans
from lowtide.memory.allocators import PeakWindow, allocated_bytes, meter_of
from lowtide.objects import structure
from lowtide.planning import Plan
from lowtide.program.sizes import strided_bytes
from lowtide.runtime.caller import is_transformed
from lowtide.runtime.calls.differentiated import WHY
from lowtide.runtime.model import Rematerialized
from lowtide.runtime.parts.submodules import is_one_operator

_Call = Callable[..., Any]
WORTH_FREEING = 0.02  # of a pass: a plan that frees less is not worth its time
_MOST_GONE = 16  # models of one class that were found and are no more
_COME_AND_GO = "models of this class come and go, and a plan for each would take longer than it lasts"


class Root:
    """What is known of a trained ``module`` of class ``kind``. ``outside``: why it runs without a plan, or empty.
    ``in_parts``: how it runs if not as a whole, and why. ``plan``: that of the largest pass so far; ``plans``: how many
    there are. ``measured_bytes``: the highest peak of passes on the CPU that called it once and made no plan.
    ``too_small``: the error of a budget in percent, raised when a backward pass begins. ``asks_again``: look again at a
    much larger pass than that with ``tried_bytes`` of arguments, as the answer may change with size. A pass also counts
    as much larger if the latest call without a plan left ``held_bytes`` (for its backward pass, say) of at least
    ``much_bytes``."""

    def __init__(self, module: nn.Module, number: int, compiled: bool) -> None:
        self.module = weakref.ref(module)
        self.kind = type(module).__name__
        self.name = self.kind if number == 1 else f"{self.kind} ({number})"
        self.compiled = compiled
        self.outside = ""
        self.too_small: InfeasibleBudgetError | None = None
        self.asks_again = False
        self.asked = self.tried_bytes = self.held_bytes = self.much_bytes = 0
        self.calls = self.planned_calls = self.plans = 0
        self.plan: Plan | None = None
        self.measured_bytes: int | None = None
        self.in_parts = ""  # how it runs if not as a whole, and why
        self._ran = 0

    def is_found_again(self, arguments: Any) -> bool:
        """Whether to look again, since this pass or the latest one is much larger."""
        is_larger = bytes_of(arguments) >= 2 * self.tried_bytes or self.held_bytes >= self.much_bytes > 0
        return self.asks_again and is_larger

    def note(self, runtime: Rematerialized | None) -> None:
        """Note what the latest call ran. ``runtime``: the module's planned forward, if any."""
        self.calls += 1
        if runtime is None:
            return
        parts = runtime.parts
        planned = [runtime, *(parts.planned() if parts else ())]
        ran = sum(one.ran for one in planned)
        self.planned_calls += ran > self._ran
        self._ran = ran
        self.plans = max(self.plans, sum(len(entries) for one in planned for entries in one.entries.values()))
        if parts is not None:
            how = f"planned in {len(planned) - 1} parts" if len(planned) > 1 else "nothing of it can be planned"
            self.in_parts = f"{'runs under lowtide.online' if runtime.is_online else how}, since {parts.why}"
        elif runtime.differentiated.any:
            self.in_parts = f"calls run without a plan where {WHY}"
        if parts is None and runtime.latest is not None:
            plan = runtime.latest.plan
            if self.plan is None or plan.unconstrained_peak_bytes >= self.plan.unconstrained_peak_bytes:
                self.plan = plan


@contextlib.contextmanager
def refused(root: Root) -> Iterator[None]:
    """A context that turns errors of planning into ``root.outside``, so that training goes on without a plan. Only a
    budget that is too small stays an error."""
    try:
        yield
    except InfeasibleBudgetError:
        root.outside = "the budget is too small for it"
        raise
    except LowtideError as error:
        root.outside = str(error)
    except Exception as error:  # noqa: BLE001 - training goes on after any error
        root.outside = f"an internal error, please report it ({type(error).__name__}: {error})"


class _Thread(threading.local):
    inside = False  # in the call of a root, or of a module that trains nothing


class Roots(contextlib.AbstractContextManager["Roots"]):
    """A context that finds roots.

    It calls ``found(root, module, args, kwargs)`` for every root before its first call runs, and again at a much larger
    call if the root asks for it; ``ended()`` after each backward pass; and ``infeasible(root, error)`` before a later
    call that does not fit the budget. Unless this raises, the call runs without a plan. ``module`` is the one to plan:
    for one made by ``torch.compile``, the module inside. A root with a plan runs that instead of compiled code.
    """

    def __init__(
        self, found: _Call, ended: Callable[[], None] = lambda: None, infeasible: _Call = lambda root, error: None
    ) -> None:
        self.roots: list[Root] = []
        self.peak_bytes = 0  # of passes without a new plan, above the level at their start
        self.passes = 0
        self._found, self._ended, self._infeasible = found, ended, infeasible
        self._known: MutableMapping[nn.Module, Root] = WeakIdKeyDictionary()  # by id: modules may define equality
        self._thread = _Thread()
        self._window: PeakWindow | None = None
        self._in_pass: list[Root] = []
        self._plans_before = 0
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Roots:
        meter_of(torch.device("cpu"))  # installs the counter
        self._original: _Call = nn.Module.__call__
        call = self._patch()
        with contextlib.ExitStack() as stack:
            stack.enter_context(replaced(nn.Module, "__call__", call))
            stack.enter_context(replaced(torch.autograd, "backward", self._backward(torch.autograd.backward)))
            # Dynamo inlines the forward pass only of modules whose ``__call__`` is this function.
            for users in (utils, nn_module):
                stack.enter_context(replaced(users, "unpatched_nn_module_call", call))
            stack.enter_context(made_of_without_plans())
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        self._end_pass(counts=False)

    def _patch(self) -> _Call:
        original, thread, outermost = self._original, self._thread, self._outermost

        # torch.profiler finds modules by the name ``self``.
        def call(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if thread.inside or not self.training or not torch.is_grad_enabled():
                return original(self, *args, **kwargs)
            return outermost(self, args, kwargs)

        return skip(call)  # Dynamo does not compile it, but may compile its callees

    def _outermost(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module that is not inside a root."""
        root = self._known.get(module)
        if root is None:
            if torch._C._current_graph_task_id() != -1:  # called by activation checkpointing in a backward pass
                return self._original(module, *args, **kwargs)
            parameters = list(module.parameters())
            if not parameters or is_wrapper(module) or torch.compiler.is_compiling() or is_transformed():
                return self._original(module, *args, **kwargs)
            if any(parameter.requires_grad for parameter in parameters) and not _is_none_yet(module, parameters):
                root = self._known[module] = self._new_root(module, args, kwargs)
        with replaced(self._thread, "inside", True):
            if root is None:
                return self._original(module, *args, **kwargs)
            return self._call(root, module, args, kwargs)

    def _new_root(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Root:
        inner = inside_of(module)
        kind = type(inner).__name__
        alike = [root for root in self.roots if root.kind == kind]
        come_and_go = sum(root.module() is None for root in alike) >= _MOST_GONE
        if come_and_go and alike[-1].outside == _COME_AND_GO:
            return alike[-1]  # share one row of the summary
        root = Root(inner, len(alike) + 1, inner is not module or inner._compiled_call_impl is not None)
        self._begin_pass(inner)
        self.roots.append(root)
        if come_and_go:
            root.outside = _COME_AND_GO
            return root
        with replaced(self._thread, "inside", True):
            self._find(root, inner, args, kwargs)
        return root

    def _find(self, root: Root, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        root.asked, root.outside, root.too_small, root.asks_again = root.asked + 1, "", None, False
        root.tried_bytes, root.much_bytes = bytes_of((args, kwargs)), 2 * root.held_bytes
        self._take_over(root, module)
        with _uncompiled(module):
            self._found(root, module, args, kwargs)

    def _take_over(self, root: Root, module: nn.Module) -> None:
        """Remove the plans of models inside a new root that were called alone before (to ask for the shape of their
        result, say): they run as part of it now."""
        inside = set(map(id, module.modules()))
        for other in self.roots:
            inner = other.module()
            if other is not root and id(inner) in inside and inner is not None and runtime_of(inner) is not None:
                with refused(other):
                    restore(inner)
                    other.outside = f"it is part of {root.name}"

    def _call(self, root: Root, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inner = inside_of(module)
        self._begin_pass(inner)
        self._in_pass.append(root)
        if root.is_found_again((args, kwargs)):
            self._find(root, inner, args, kwargs)
        if not root.outside:
            try:
                with _uncompiled(inner):
                    result = inner._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
            except (CaptureError, InfeasibleBudgetError) as error:  # no plan for these shapes or flags
                if isinstance(error, InfeasibleBudgetError):
                    root.tried_bytes = bytes_of((args, kwargs))
                    self._infeasible(root, error)
                else:
                    root.outside = str(error)
                restore(inner)
            else:
                root.note(runtime_of(inner))
                return result
        root.note(None)
        device = next(module.parameters()).device
        before = allocated_bytes(device) or 0
        result = self._original(module, *args, **kwargs)
        root.held_bytes = (allocated_bytes(device) or 0) - before
        root.much_bytes = root.much_bytes or 2 * root.held_bytes
        return result

    def _begin_pass(self, module: nn.Module) -> None:
        device = next(module.parameters()).device.type
        meter = meter_of(torch.device("cpu")) if device == "cpu" else None  # leave CUDA's statistics to the script
        if self._window is None and meter is not None:
            self._window, self._plans_before = PeakWindow(meter), self._plans()

    def _plans(self) -> int:
        return sum(root.asked + root.plans + bool(root.outside) for root in self.roots)

    def _backward(self, original: _Call) -> _Call:
        def backward(*args: Any, **kwargs: Any) -> Any:
            if self._thread.inside or torch._C._current_graph_task_id() != -1:  # inside a pass
                return original(*args, **kwargs)
            for root in self._in_pass:
                if root.too_small is not None:
                    raise root.too_small
            result = original(*args, **kwargs)
            if self._in_pass:
                self._end_pass(counts=True)
                self._ended()
            return result

        return backward

    def _end_pass(self, counts: bool) -> None:
        called, window = self._in_pass, self._window
        self._in_pass, self._window, self.passes = [], None, self.passes + counts
        if window is None:
            return
        peak = window.peak_bytes
        window.close()
        if counts and self._plans_before == self._plans():
            self.peak_bytes = max(self.peak_bytes, peak)
            if len(called) == 1:
                called[0].measured_bytes = max(called[0].measured_bytes or 0, peak)


def _is_none_yet(module: nn.Module, parameters: Sequence[nn.Parameter]) -> bool:
    """Whether the call only sets up a model: computes a layer's weight, or initializes lazy parameters."""
    return isinstance(module, ParametrizationList) or any(map(is_lazy, parameters))


def bytes_of(arguments: Any) -> int:
    """Bytes of all tensors among the arguments of a call."""
    return strided_bytes(structure.flatten(arguments)[0])


def inside_of(module: nn.Module) -> nn.Module:
    """The module that ``torch.compile`` was given, of one that it made; else the module."""
    modules, name = module.__dict__.get("_modules", {}), "_orig_mod"  # of a scripted module these are no dictionary
    inner = modules[name] if name in modules else module  # noqa: SIM401
    return inner if isinstance(inner, nn.Module) else module


@contextlib.contextmanager
def _uncompiled(module: nn.Module) -> Iterator[None]:
    """A context in which a module compiled by ``module.compile()`` runs uncompiled."""
    name = "_compiled_call_impl"
    compiled = module.__dict__.pop(name, None)
    try:
        yield
    finally:
        if compiled is not None:
            module.__dict__[name] = compiled


def is_wrapper(module: nn.Module) -> bool:
    """Whether ``module`` only wraps what is trained: it distributes a model, or runs a trainer's step."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return True
    if isinstance(module, nn.DataParallel):
        return len(module.device_ids) <= 1  # with more devices it makes copies in each call
    # A LightningModule refers to its trainer with all its state, which guards could not cover.
    return any(kind.__name__ in ("LightningModule", "DeepSpeedEngine") for kind in type(module).__mro__)


def not_planned(module: nn.Module) -> str:
    """Why planning a module is not even tried; empty if it is."""
    if is_one_operator(module):
        return "it is one operator, of which there is nothing to run again"
    if isinstance(module, nn.DataParallel):
        return "DataParallel runs copies of the model that are new in every step; use DistributedDataParallel"
    if type(module).__name__ == "FullyShardedDataParallel":
        return "FullyShardedDataParallel flattens its parameters; use fully_shard, its successor"
    return ""
