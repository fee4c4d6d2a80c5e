"""``Part``: the planned ``forward`` of a submodule; ``PartsInPlace``: all parts of a model, and when they replace
submodules."""

from __future__ import annotations

import contextlib
import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lowtide.capture import Captured
from lowtide.capture.model_state import State, model_state
from lowtide.capture.trace.patches import replaced
from lowtide.capture.trace.sizes import Shapes
from lowtide.errors import CaptureError, NoGradientError
from lowtide.memory.collector import collect_young, collector_held
from lowtide.pipeline import Finish
from lowtide.planning import Plan
from lowtide.program import Program
from lowtide.program.results import GradientMask
from lowtide.runtime.calls.differentiated import DifferentiatedAgain
from lowtide.runtime.parts.backward_calls import BackwardCalls
from lowtide.runtime.parts.casts import KeptCasts
from lowtide.runtime.parts.forward_pass import ForwardPass, with_siblings
from lowtide.runtime.parts.outside import OutsideWatch
from lowtide.runtime.parts.recomputed import Recomputation
from lowtide.runtime.parts.routing import Routing
from lowtide.runtime.parts.shared import SharedBudget
from lowtide.runtime.parts.sharing_forward import SharingForward, device_of
from lowtide.runtime.parts.step_record import StepRecord
from lowtide.runtime.parts.submodules import (
    can_run_in_parts,
    forwards_given,
    list_of,
    made_like,
    saves_otherwise,
    tried_in,
)
from lowtide.runtime.programs.entry import Entry, Sample, Signature
from lowtide.runtime.programs.kin import Alike, FamilyCall, Kin, Kins, kind_of
from lowtide.runtime.programs.recaptures import UnusualCallError
from lowtide.sharing import Member

_LOG = logging.getLogger(__name__)
_MOST_NEW = 3  # programs in a row whose calls did not come again, before planning stops


class Part(SharingForward):
    """A submodule that is tried as a part.

    - ``outside``: why it is not planned, once known (empty if it has no gradient).
    - ``changes``: because its program differs in every call; ``selects``: because it selects a number of rows that
      depends on data.
    - ``runs_again``: whether its own code, with all submodules, runs again in the backward pass.
    """

    def __init__(self, module: nn.Module, parts: PartsInPlace, name: str) -> None:
        super().__init__(module, parts.shared)
        self.in_terms = True  # other calls, and other code with the same tensors, add to gradients
        self.parts, self.name = parts, name
        self._list = list_of(parts.model, name)
        self._kins = Kins(self._kins.dynamic, parts.alike_in.setdefault(self.kind, {}) if self.kind else None)
        self.outside: str | None = None
        self.selects, self.changes = False, False
        self.runs_again = False
        self.is_alone = False  # its submodules are not tried as parts either
        self.differentiated = DifferentiatedAgain(name, parts.watch.differentiated)  # by code around it
        self._recomputation = Recomputation()
        self._asked: Any = None  # key of the call to plan for, and how the module was made
        self._new, self._seen_apart = 0, False  # programs since one was reused; whether a call ran as it is
        self._seen_outside = False  # whether its own code has run
        self._is_frozen = False  # the latest call read nothing that requires a gradient

    def call(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            self.parts.backward.hidden = True
            return self.original_forward(*args, **kwargs)
        if not self.parts.running or saves_otherwise():
            return self.original_forward(*args, **kwargs)
        nested = self.parts.backward.are_under_way
        self.parts.backward.found |= nested
        if self.outside is None:
            with self.parts.lifted(self.model), collector_held():  # keep objects of a capture in the young generation
                try:
                    self.parts.casts.refuse_shared(self.model, self.parts.model, self.parts.device)
                    return super().call(*args, **kwargs)
                except NoGradientError:
                    self.outside = ""
                except UnusualCallError as error:
                    _LOG.info("a call of %s runs as it is, its submodules as parts: %s", self.name, str(error))
                    self.shared.unlike, self._seen_apart = self.shared.unlike or not self._seen_apart, True
                except CaptureError as error:
                    self.outside = str(error)  # only the text: the error's traceback holds tensors
                    self.selects = error.selects
                    self._leave()
                    _LOG.info("%s runs as it is, its submodules are tried as parts: %s", self.name, self.outside)
                collect_young()
                self.shared.go_on()
        if nested:  # what it keeps is freed soon
            return self.original_forward(*args, **kwargs)
        self.runs_again = self.runs_again or self._would_exceed()
        if self.runs_again:
            with self.parts.paused(), self.parts.watch.runs_again():
                return self._recomputation.run(self.model, self.original_forward, args, kwargs, self.shared.in_backward)
        alone = self.parts.paused() if self.is_alone else contextlib.nullcontext()
        self._seen_outside = True
        own = self.parts.routing.under_way(type(self.model), selects=self.selects or self.changes)
        with self.parts.watch.call(self.name, type(self.model), (args, kwargs)), own, alone:
            return self.original_forward(*args, **kwargs)

    def _would_exceed(self) -> bool:
        """Whether a module that hands rows to experts has to run again in the backward pass. Modules like it ran in the
        current step, and the room left in the budget is less than twice the bytes that one keeps (for its first run,
        and a second run of another)."""
        if self.outside is None or self._seen_outside or type(self.model) not in self.parts.routing.routers:
            return False
        kept_bytes = self.parts.watch.kept_by(type(self.model))
        exceeds = kept_bytes > 0 and self.shared.left_bytes() < 2 * kept_bytes
        if exceeds:
            _LOG.info("the budget has no room for what %s keeps: it is to run again in the backward pass", self.name)
        return exceeds

    def _run_apart(self, key: Signature, inputs: list[torch.Tensor], error: CaptureError, always: bool) -> None:
        raise error if always else UnusualCallError(str(error))

    def _run(self, sample: Sample, inputs: list[torch.Tensor], state: State, tree: Any) -> Any:
        kind = self.differentiated.kind_of(inputs, sys._getframe(1), PartsInPlace.call.__code__)
        if kind is None:
            return super()._run(sample, inputs, state, tree)
        self.shared.unlike = self.shared.unlike or self.differentiated.is_new(kind)
        result = self.differentiated.run(kind, self.original_forward, sample.args, sample.kwargs)
        self.shared.go_on()
        return result

    def _is_trained(self) -> bool:
        return True

    def _run_as_it_is(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self._is_frozen = True
        return super()._run_as_it_is(args, kwargs)

    def run(self, entry: Entry, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        self._is_frozen = False
        return super().run(entry, inputs)

    def find(self, key: Signature, modules: Sequence[nn.Module], inputs: list[torch.Tensor]) -> Entry | None:
        entry = super().find(key, modules, inputs)
        if entry is not None:
            self._new = 0
        return entry

    def _captured(self, sample: Sample, mask: GradientMask | None) -> Captured:
        if not self.is_unusual:  # unusual programs are few
            self._refuse_new(1 if self.may_change else _MOST_NEW)
        try:
            captured = super()._captured(sample, mask)
        except CaptureError as error:
            if error.selects and not (self.is_unusual or self.entries):
                self.parts.refused[self._asked] = str(error), True, False
            raise
        self._new += not (self.is_unusual or captured.contract.conditions.turn)
        return captured

    def entry_for(self, mask: GradientMask, old: Entry, inputs: Sequence[torch.Tensor]) -> Entry:
        with self.parts.lifted(self.model):  # the new capture may call submodules
            return super().entry_for(mask, old, inputs)

    def _member(
        self, key: Signature, sample: Sample, inputs: list[torch.Tensor], state: State
    ) -> tuple[Kin | None, Shapes | None, FamilyCall | None]:
        if not self.entries:
            self._asked = key, made_like(state.modules)
            self._refuse_as_another()
        if not self.is_unusual:
            self._refuse_as_expert(kind_of(key, len(state.tensors)), inputs, len(state.tensors))
        found = super()._member(key, sample, inputs, state)
        if found[2] is not None and self.parts.decides_sizes_of(self):
            self._refuse_new(1)
            self._new += 1
        return found

    def planned(self, captured: Captured, sample: Sample, finish: Finish, **known: Any) -> tuple[Program, Plan]:
        """As of ``Programs``. Raises ``CaptureError`` if its first program holds at least as many bytes as it can free.
        Also raises it if the program depends on drawn numbers and submodules can be planned (layers that Python's
        generator selects)."""
        if captured.contract.conditions.draws is not None and can_run_in_parts(self.model):
            raise CaptureError("its program depends on what the generators of Python or NumPy draw")
        program, plan = super().planned(captured, sample, finish, **known)
        member = Member(program, plan.costs)
        if self._replaced is None and not self.entries and member.freed_bytes <= member.held_bytes:
            self.parts.refused[self._asked] = "a plan for it alone could free nothing", False, member.freed_bytes == 0
            self._refuse_as_another()
        return program, plan

    @property
    def may_change(self) -> bool:
        """Whether its program depends on numbers in its arguments, or a module around it gives it a varying number of
        rows."""
        asked = () if self.latest is None else self.latest.conditions[0].questions
        return any(not isinstance(one.answer, bool) for one in asked) or self.parts.decides_sizes_of(self)

    def _refuse_as_expert(self, kind: Signature, inputs: list[torch.Tensor], states: int) -> None:
        """Raise ``CaptureError`` if a module around it gives it a number of rows that depends on data."""
        routing = self.parts.routing
        if self.kind and routing.gives_other_rows(self, (self.kind, kind), [one.shape for one in inputs[states:]]):
            self.is_alone = True
            self._refuse_changing("rows that data select")
        if self.entries:
            return
        latest = (one.latest for one in self.parts.planned() if type(one.model) is type(self.model))
        like = [one for one in latest if one is not None and kind_of(one.key, one.states) == kind]
        if routing.gives_other_numbers(self.model, inputs, states, like):
            self._refuse_changing("numbers of rows that data select")

    def _refuse_new(self, most: int) -> None:
        """Raise ``CaptureError`` after ``most`` programs that were not reused: every call needs another one."""
        if self._new >= most:
            self._refuse_changing(f"{self._new + 1} in a row")

    def _refuse_changing(self, why: str) -> None:
        self.changes = True
        raise CaptureError(f"its program is another one in every call ({why}), which takes longer to plan than to run")

    def _refuse_as_another(self) -> None:
        """Raise the error that a module made alike got for such a call."""
        why, selects, is_alone = self.parts.refused.get(self._asked, ("", False, False))
        if why:
            self.is_alone = is_alone
            raise CaptureError(why, selects=selects)

    def _leave(self) -> None:
        """Its memory counts as held by code between parts from now on."""
        if self.entries:
            self.entries.clear()
            self.shared.record = StepRecord()

    def _may_be_apart(self) -> bool:
        return True

    def is_of(self, module: nn.Module | None) -> bool:
        """Whether ``module`` is its module; for ``None``, whether its module no longer exists."""
        return self._model() is module

    @property
    def kind(self) -> tuple[type, str] | None:
        """The module's class and the list that contains it, which modules alike share; ``None`` if no list contains
        it."""
        return None if self._list is None else (type(self.model), self._list)

    @property
    def may_run(self) -> bool:
        """Whether it may run by a plan, as far as is known."""
        return self.outside is None and not (self.runs_again or self._is_frozen)


class PartsInPlace:
    """The parts of one model. They replace their submodules' ``forward`` while the model is called, and in backward
    passes that may call submodules."""

    def __init__(self, model: nn.Module, shared: SharedBudget) -> None:
        self._model = weakref.ref(model)
        self.shared = shared
        self.device = device_of(model_state(model).tensors)
        self.watch = OutsideWatch(shared)
        self.backward = BackwardCalls(shared, self._standing)
        self.casts = KeptCasts()
        self.alike_in: dict[tuple[type, str], dict[Any, Alike]] = {}  # families of programs by kind of part
        self.refused: dict[Any, tuple[str, bool, bool]] = {}  # why parts were refused, by call and making of module
        self.selects = False  # see ``Part``
        self.routing = Routing()
        self._parts: dict[int, Part] = {}  # by the id of the module
        self._calls = 0
        self._paused = False

    @property
    def is_called(self) -> bool:
        """Whether a call of the model is running."""
        return self._calls > 0

    @property
    def running(self) -> bool:
        """Whether a call of the model is running, or a backward pass that may call submodules."""
        return (self.is_called or self.backward.are_under_way) and not self._paused

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """A context in which no submodule runs as a part."""
        return replaced(self, "_paused", True)

    @property
    def model(self) -> nn.Module:
        found = self._model()
        assert found is not None
        return found

    def call(self, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call the model's own ``forward`` while parts replace its submodules'."""
        with self.routing.under_way(type(self.model), selects=self.selects):
            return forward(*args, **kwargs)

    def _with_siblings(self, passes: list[ForwardPass]) -> list[ForwardPass]:
        return with_siblings(passes, {id(part): part for part in self._parts.values() if part.may_run}, self._in_order)

    def _in_order(self) -> Iterator[Part]:
        return (self._parts[id(module)] for _, module in tried_in(self.model) if id(module) in self._parts)

    def decides_sizes_of(self, part: Part) -> bool:
        """Whether a module around ``part`` gives it tensors whose sizes depend on data (selected rows, say)."""
        return any(one.changes and part.name.startswith(f"{one.name}.") for one in self._parts.values())

    def planned(self) -> list[Part]:
        return [part for part in self._parts.values() if part.entries]

    @contextlib.contextmanager
    def _standing(self) -> Iterator[None]:
        """A context in which parts replace submodules."""
        given = [(module, self._part(name, module)) for name, module in tried_in(self.model)]
        if len(given) < len(self._parts):
            self._parts = {key: part for key, part in self._parts.items() if not part.is_of(None)}
        with forwards_given(given):
            yield

    def _part(self, name: str, module: nn.Module) -> Part:
        """The part for a submodule, made anew if the module's ``forward`` was replaced since."""
        part = self._parts.get(id(module))
        stands = part is not None and module.__dict__.get("forward") is part
        if part is None or not (part.is_of(module) and (stands or part.given_forward == module.forward)):
            self._parts[id(module)] = part = Part(module, self, name)
        return part

    def lifted(self, part: nn.Module) -> contextlib.AbstractContextManager[None]:
        """A context in which the submodules of ``part`` have their own ``forward`` again."""
        installed = ((module, module.__dict__.get("forward")) for module in part.modules() if module is not part)
        ours = [(module, own) for module, own in installed if isinstance(own, Part) and own.parts is self]
        return forwards_given(
            [(module, own.original_forward if own.had_instance_forward else None) for module, own in ours]
        )
