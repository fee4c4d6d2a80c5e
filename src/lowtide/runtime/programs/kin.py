"""Calls that differ only in tensor sizes: captured once for all sizes, and plans found for one size serve the others.

The first two calls of a kind are captured by themselves. The third, with other sizes (or with a mask that selects
another number of rows), is captured with symbolic sizes (``capture.family``). This family must reproduce the capture
before it. From then on, a call of new sizes is neither traced nor measured: its program is the family's at these sizes,
its costs follow from measured ones, and its plan is the quickest known schedule that fits.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from lowtide.capture import Captured, Known
from lowtide.capture.convert.gradients import split_sums
from lowtide.capture.family import SymbolicFamily, capture_family
from lowtide.capture.python_state.effects.held_inputs import HeldInputs
from lowtide.capture.trace.questions import Question
from lowtide.capture.trace.sizes import Place, Shapes, extents
from lowtide.cost.scaled import Measured
from lowtide.ir import Schedule
from lowtide.program import Program
from lowtide.program.distributed.local import spec_of
from lowtide.program.results import GradientMask
from lowtide.runtime.programs.entry import Entry, Sample, Siblings, Signature
from lowtide.stage_times import stage

_LOG = logging.getLogger(__name__)
_ALONE = 2  # shapes captured by themselves: a short last batch alone makes no family
_MOST_FIXED = 2  # families that turn out to be valid for one call only
_MOST_VAIN = 2  # families that no other call belonged to: lengths among the arguments may differ in each call
_MOST = 5  # families of a kind: other sizes may begin to vary, or lead to other programs
_MOST_KINDS = 16  # kinds of calls kept per model
_MOST_SHAPES = 1000  # shapes remembered per kind
_MOST_MEASURED = 4  # sizes whose costs are kept
_MOST_SEARCHES = 4  # background searches, not counting those for larger sizes


@dataclass(eq=False)
class Alike:
    """Programs with the same ``operators`` at other sizes, and what is known of them: ``measured`` costs, schedules,
    and how many ``searches`` were made."""

    operators: Any = None
    siblings: Siblings = field(default_factory=Siblings)
    measured: list[Measured] = field(default_factory=list)
    searches: int = 0
    largest_ns: int = 0  # longest operator time of a searched program

    def join(self, entry: Entry, *, measured: bool) -> None:
        """Add ``entry``, whose costs were ``measured`` or derived from others. If it has other operators (states of an
        optimizer move from now on), start over with these: later programs will have them too."""
        if not self.tells_of(entry.program):
            self.operators, self.siblings, self.measured, measured = operators(entry.program), Siblings(), [], True
        if measured:
            self.measured = [*self.measured, Measured.of(entry.program, entry.plan.costs)][-_MOST_MEASURED:]
        self.siblings.keep(entry)

    def tells_of(self, program: Program) -> bool:
        """Whether ``program`` has these operators."""
        return bool(self.operators == operators(program))

    @property
    def tells(self) -> bool:
        """Whether enough costs were measured to derive those at other sizes."""
        return len(self.measured) >= _ALONE

    def wants_search(self, entry: Entry) -> bool:
        """Whether to search for a better plan for ``entry``. A plan found for one serves all, so few searches
        suffice."""
        total_ns = entry.plan.costs.total_time_ns
        if self.searches >= _MOST_SEARCHES and total_ns <= 1.1 * self.largest_ns:
            return False
        self.searches += 1
        self.largest_ns = max(self.largest_ns, total_ns)
        return True


@dataclass(eq=False)
class Branch(Alike):
    """The programs of one ``family``. ``met``: how many calls of new sizes or values belonged to it."""

    family: SymbolicFamily = field(kw_only=True)
    met: int = 0

    @property
    def is_vain(self) -> bool:
        """Whether only the call that the family was captured for belonged to it."""
        return self.met <= 1


class FamilyCall(NamedTuple):
    """A call that belongs to a family. ``captured``: what its own capture would give."""

    captured: Captured
    branch: Alike


@dataclass(eq=False)
class Kin:
    """The calls of one kind. ``known``: the last one captured by itself; ``sizes``: of the first ones, shapes and
    numbers of rows that data select; ``at_once``: all sizes may vary; ``fixed``: how many families were valid for one
    call only; ``mask``: how gradients arrived if not as predicted, provided that calls of other sizes can have it
    too."""

    at_once: bool = False
    branches: list[Branch] = field(default_factory=list)
    known: tuple[Entry, Shapes] | None = None
    shapes: list[Shapes] = field(default_factory=list)
    sizes: set[tuple[Shapes, Any]] = field(default_factory=set)
    fixed: int = 0
    hopeless: bool = False
    mask: GradientMask | None = None

    def arrived(self, mask: GradientMask) -> None:
        """Gradients arrived as ``mask`` says: capture calls of other sizes for this mask from now on."""
        any_size = all(isinstance(one, bool) or not any(one) for one in mask)
        self.mask = mask if any_size else None

    def member(
        self, shapes: Shapes, holds: Callable[[Captured], bool], asked: Callable[[HeldInputs, Question], Any]
    ) -> FamilyCall | None:
        """The capture of a call with tensors of these ``shapes`` from a family whose conditions hold, or ``None``.
        ``asked``: answers questions of families whose inputs are held in attributes."""
        for branch in self.branches:
            if self.mask not in (None, branch.family.mask):
                continue
            answer = functools.partial(lambda held, _, question: asked(held, question), branch.family.held_inputs)
            captured = branch.family.member(shapes, answer)
            if captured is not None and holds(captured):
                return FamilyCall(captured, branch)
        return None

    def is_new(self, shapes: Shapes) -> bool:
        """Whether to capture a family for a call of these ``shapes``, which belongs to none."""
        enough = len(self.sizes) >= (1 if self.at_once else _ALONE)
        differs = shapes not in self.shapes or any(selected for _, selected in self.sizes)
        vain = sum(branch.is_vain for branch in self.branches)
        more = not self.hopeless and len(self.branches) < _MOST and vain < _MOST_VAIN
        return enough and differs and more and not self._is_special(shapes)

    def _is_special(self, shapes: Shapes) -> bool:
        """Whether a varying size is 0 or 1 here: this leads to another program."""
        return any(shapes[number][dim] <= 1 for number, dim in _varying([*self.shapes, shapes])[0])

    def extend(
        self, model: nn.Module, sample: Sample, shapes: Shapes, capture: Callable[[], Captured], terms_from: int | None
    ) -> None:
        """Capture a family for this call, and confirm that it reproduces the last call captured by itself. If that call
        tells nothing, confirm it with this one, which ``capture`` captures by itself."""
        assert self.known is not None
        entry, others = self.known
        seen = self.shapes if shapes in self.shapes else [*self.shapes, shapes]
        varying, apart = _all_places(seen) if self.at_once else _varying(seen)
        how: dict[str, Any] = {"apart": apart, "mask": entry.captured.program.mask, "known": Known.like(entry.captured)}
        how["rewrite"] = None if terms_from is None else functools.partial(split_sums, first=terms_from)
        captured = functools.partial(capture_family, model, *sample.standing(), varying, **how)
        try:
            with stage("capture"):
                family = captured(like=entry.captured)
            if family.is_fixed:
                self.fixed += 1
                if self.fixed == _MOST_FIXED:
                    self._give_up(model, "an operator or the model's code takes sizes as numbers")
                return
            known = family.confirmed_by(entry.captured, others)
            confirmed = known
            if known is None:
                own = capture()
                if own.contract.numbers != entry.captured.contract.numbers:
                    family = captured(like=own)
                confirmed = family.confirmed_by(own, shapes)
        except Exception as error:  # noqa: BLE001 - each shape can still be captured by itself
            self._give_up(model, f"{type(error).__name__}: {error}")
            return
        if not confirmed:
            self._give_up(model, "with symbolic sizes it is another program than with these")
            return
        self.branches.append(Branch(family=family))
        if known:
            self.branches[-1].join(entry, measured=True)

    def _give_up(self, model: nn.Module, why: str) -> None:
        self.hopeless = True
        _LOG.info("%s is captured anew for each shape: %s", type(model).__name__, why)

    def met(self, entry: Entry, shapes: Shapes, member: FamilyCall | None, *, measured: bool) -> None:
        """Note that ``entry`` was planned for a call that is a ``member`` of a family, or that was captured by
        itself."""
        if shapes not in self.shapes:
            self.shapes = [*self.shapes, shapes][-_MOST_SHAPES:]
        if member is None:
            self.known = entry, shapes
            if len(self.sizes) < _ALONE:
                asked = entry.captured.contract.conditions.questions
                self.sizes.add((shapes, tuple(one.answer for one in asked if one.ask == "shape")))
        else:
            member.branch.join(entry, measured=measured)
            if isinstance(member.branch, Branch):
                member.branch.met += 1


def kind_of(key: Signature, states: int) -> Signature:
    """The part of a signature that calls share if they differ only in sizes. The first ``states`` inputs are the
    model's."""
    names, tree, layouts, *others = key
    tensors = tuple((len(shape), *facts, *signs) for (shape, *facts), _, *signs in layouts[states:])
    return names, tree, layouts[:states], tensors, *others


def shapes_of(tensors: Sequence[torch.Tensor]) -> Shapes | None:
    """The shapes of a call's tensors; ``None`` if there are none, or one has a layout that families cannot have."""
    if not (tensors and all(one.storage_offset() == 0 or not one.requires_grad for one in tensors)):
        return None
    return tuple(map(extents, tensors))


def _varying(known: Sequence[Shapes]) -> tuple[list[Place], bool]:
    """The places where sizes differ, and whether some sizes are equal in the latest call but not in all calls."""
    columns = {place: tuple(one[place[0]][place[1]] for one in known) for place in _places(known)}
    varying = {place: column for place, column in columns.items() if len(set(column)) > 1}
    return list(varying), len({column[-1] for column in varying.values()}) < len(set(varying.values()))


def _all_places(known: Sequence[Shapes]) -> tuple[list[Place], bool]:
    """The places where some call has more than one element, and ``True``: sizes that are equal may differ in other
    calls."""
    return [(number, dim) for number, dim in _places(known) if any(one[number][dim] > 1 for one in known)], True


def _places(known: Sequence[Shapes]) -> list[Place]:
    return [(number, dim) for number, shape in enumerate(known[0]) for dim in range(len(shape))]


def operators(program: Program) -> Any:
    """A key that is equal for programs that differ only in sizes. A schedule of one is valid for the other."""
    ops = tuple((op.target, op.inputs, op.outputs, op.overwrites) for op in program.graph.ops)
    return ops, tuple(value.storage for value in program.graph.values), program.graph.outputs


def schedules_of(entry: Entry | None, program: Program) -> list[Schedule]:
    """The schedule of ``entry`` if it is valid for ``program`` too."""
    same = entry is not None and operators(entry.program) == operators(program)
    return [entry.plan.schedule] if entry is not None and same else []


class Kins:
    """The most recently used kinds of calls of one model. ``dynamic``: as for ``rematerialize``. ``alike``: programs by
    their operators, also those of other models with the same operators."""

    def __init__(self, dynamic: bool | None, alike: dict[Any, Alike] | None = None) -> None:
        self.dynamic = dynamic
        self._kinds: dict[Signature, Kin] = {}
        self._alike = {} if alike is None else alike

    def alike(self, program: Program) -> Alike | None:
        """The known programs with the same operators as this one, which was captured by itself. This serves calls
        without a family: those whose sizes depend on numbers, such as the lengths of packed sequences."""
        if self.dynamic is False:
            return None
        key = operators(program)
        self._alike[key] = found = self._alike.pop(key, None) or Alike()
        if len(self._alike) > _MOST_KINDS:
            del self._alike[next(iter(self._alike))]
        return found

    def of(self, key: Signature, inputs: Sequence[torch.Tensor], states: int) -> tuple[Kin, Shapes] | tuple[None, None]:
        """The ``Kin`` of a call with these flat inputs, and the shapes of those that are not the model's (after the
        first ``states``)."""
        # Programs also contain the global sizes of distributed tensors, and the number of entries of sparse ones.
        special = any(spec_of(tensor) is not None or tensor.layout is not torch.strided for tensor in inputs)
        shapes = None if special or self.dynamic is False else shapes_of(inputs[states:])
        if shapes is None:
            return None, None
        kind = kind_of(key, states), tuple(map(len, shapes))
        self._kinds[kind] = kin = self._kinds.pop(kind, None) or Kin(self.dynamic is True)
        if len(self._kinds) > _MOST_KINDS:
            del self._kinds[next(iter(self._kinds))]
        return kin, shapes
