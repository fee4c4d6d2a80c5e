"""Calls that differ in the sizes of their tensors alone: captured once for all sizes, and plans found for one serve the others.

The first two calls of a kind are captured by themselves. The third one, of other sizes (or with a mask that selects another
number of rows), is captured with symbols for what varies (``capture.family``), and the capture before must come out of that
again. From then on a call of new sizes is neither traced nor measured: its program is the family's at these sizes, its costs
follow from those that were measured, and its plan is the quickest known schedule that fits it.
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
_ALONE = 2  # shapes that are captured by themselves: a short last batch is no reason for more
_MOST_FIXED = 2  # families that turn out to be of one call alone
_MOST_VAIN = 2  # families that no other call was of: lengths among the arguments, say, are others in each
_MOST = 5  # families of a kind: sizes vary later, or make for other programs
_MOST_KINDS = 16  # of calls of one model
_MOST_SHAPES = 1000  # that are known to have been met
_MOST_MEASURED = 4  # sizes whose costs are kept
_MOST_SEARCHES = 4  # in the background, and further ones for larger sizes


@dataclass(eq=False)
class Alike:
    """Programs of the same ``operators`` at other sizes, and what is known of them: costs that were ``measured``, schedules."""

    operators: Any = None
    siblings: Siblings = field(default_factory=Siblings)
    measured: list[Measured] = field(default_factory=list)
    searches: int = 0
    largest_ns: int = 0  # of the programs that were searched for

    def join(self, entry: Entry, *, measured: bool) -> None:
        """``entry`` is one of them, its costs ``measured`` or following from others'. Where it has other operators (states of
        an optimizer move from now on), those that follow will have them, too."""
        if not self.tells_of(entry.program):
            self.operators, self.siblings, self.measured, measured = operators(entry.program), Siblings(), [], True
        if measured:
            self.measured = [*self.measured, Measured.of(entry.program, entry.plan.costs)][-_MOST_MEASURED:]
        self.siblings.keep(entry)

    def tells_of(self, program: Program) -> bool:
        """Whether ``program`` is one of them."""
        return bool(self.operators == operators(program))

    @property
    def tells(self) -> bool:
        """Whether costs at other sizes follow from those that are known."""
        return len(self.measured) >= _ALONE

    def wants_search(self, entry: Entry) -> bool:
        """Whether to search for a better plan for ``entry``: what is found serves all, so few searches do."""
        total_ns = entry.plan.costs.total_time_ns
        if self.searches >= _MOST_SEARCHES and total_ns <= 1.1 * self.largest_ns:
            return False
        self.searches += 1
        self.largest_ns = max(self.largest_ns, total_ns)
        return True


@dataclass(eq=False)
class Branch(Alike):
    """Those of a family, which so many calls of other sizes or values have ``met``."""

    family: SymbolicFamily = field(kw_only=True)
    met: int = 0

    @property
    def is_vain(self) -> bool:
        """Whether only the call that it was captured for has been one of it."""
        return self.met <= 1


class FamilyCall(NamedTuple):
    """A call of a family: what a capture of it would give."""

    captured: Captured
    branch: Alike


@dataclass(eq=False)
class Kin:
    """The calls of one kind. ``known``: the last that was captured by itself; ``sizes``: of the first that were, shapes and the
    numbers of rows that data select; ``at_once``: all sizes may vary; ``fixed``: how often a family was of one call alone;
    ``mask``: how gradients arrived where that was not as guessed, if calls of other sizes can have it, too."""

    at_once: bool = False
    branches: list[Branch] = field(default_factory=list)
    known: tuple[Entry, Shapes] | None = None
    shapes: list[Shapes] = field(default_factory=list)
    sizes: set[tuple[Shapes, Any]] = field(default_factory=set)
    fixed: int = 0
    hopeless: bool = False
    mask: GradientMask | None = None

    def arrived(self, mask: GradientMask) -> None:
        """In a backward pass gradients arrived like this: calls of other sizes are captured for that from now on."""
        any_size = all(isinstance(one, bool) or not any(one) for one in mask)
        self.mask = mask if any_size else None

    def member(
        self, shapes: Shapes, holds: Callable[[Captured], bool], asked: Callable[[HeldInputs, Question], Any]
    ) -> FamilyCall | None:
        """The capture of a call with tensors of these ``shapes``, where a family has it and its conditions hold;
        ``asked``: what is answered to a question, where some inputs are held in attributes."""
        for branch in self.branches:
            if self.mask not in (None, branch.family.mask):
                continue
            answer = functools.partial(lambda held, _, question: asked(held, question), branch.family.held_inputs)
            captured = branch.family.member(shapes, answer)
            if captured is not None and holds(captured):
                return FamilyCall(captured, branch)
        return None

    def is_new(self, shapes: Shapes) -> bool:
        """Whether a family should be captured for a call of these ``shapes``, which is no member of one."""
        enough = len(self.sizes) >= (1 if self.at_once else _ALONE)
        differs = shapes not in self.shapes or any(selected for _, selected in self.sizes)
        vain = sum(branch.is_vain for branch in self.branches)
        more = not self.hopeless and len(self.branches) < _MOST and vain < _MOST_VAIN
        return enough and differs and more and not self._is_special(shapes)

    def _is_special(self, shapes: Shapes) -> bool:
        """Whether a size that varies is 1 or 0 here, which makes a program of its own."""
        return any(shapes[number][dim] <= 1 for number, dim in _varying([*self.shapes, shapes])[0])

    def extend(
        self, model: nn.Module, sample: Sample, shapes: Shapes, capture: Callable[[], Captured], terms_from: int | None
    ) -> None:
        """Capture a family that has this call, and confirm it by the last call that was captured by itself; by this one, which
        ``capture`` captures by itself, where that tells nothing."""
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
        except Exception as error:  # noqa: BLE001 - by itself each shape can be captured all the same
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
        """``entry`` has been planned, for a call that is a ``member`` of a family, or was captured by itself."""
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
    """What calls with this signature share with those that differ in sizes alone; the first ``states`` inputs are the
    model's."""
    names, tree, layouts, *others = key
    tensors = tuple((len(shape), *facts, *signs) for (shape, *facts), _, *signs in layouts[states:])
    return names, tree, layouts[:states], tensors, *others


def shapes_of(tensors: Sequence[torch.Tensor]) -> Shapes | None:
    """Of a call's tensors; ``None`` where one is laid out in another way than a family's are."""
    if not (tensors and all(one.storage_offset() == 0 or not one.requires_grad for one in tensors)):
        return None
    return tuple(map(extents, tensors))


def _varying(known: Sequence[Shapes]) -> tuple[list[Place], bool]:
    """The places at which sizes differ, and whether sizes that are equal in the latest call are not so in all."""
    columns = {place: tuple(one[place[0]][place[1]] for one in known) for place in _places(known)}
    varying = {place: column for place, column in columns.items() if len(set(column)) > 1}
    return list(varying), len({column[-1] for column in varying.values()}) < len(set(varying.values()))


def _all_places(known: Sequence[Shapes]) -> tuple[list[Place], bool]:
    """Those at which some call has more than one element; equal sizes need not be so in all calls."""
    return [(number, dim) for number, dim in _places(known) if any(one[number][dim] > 1 for one in known)], True


def _places(known: Sequence[Shapes]) -> list[Place]:
    return [(number, dim) for number, shape in enumerate(known[0]) for dim in range(len(shape))]


def operators(program: Program) -> Any:
    """Equal for programs that are the same but for sizes: a schedule of one is one of the other."""
    ops = tuple((op.target, op.inputs, op.outputs, op.overwrites) for op in program.graph.ops)
    return ops, tuple(value.storage for value in program.graph.values), program.graph.outputs


def schedules_of(entry: Entry | None, program: Program) -> list[Schedule]:
    """The schedule of ``entry``, where it is one of ``program``, too."""
    same = entry is not None and operators(entry.program) == operators(program)
    return [entry.plan.schedule] if entry is not None and same else []


class Kins:
    """The kinds of calls of one model that were met last. ``dynamic`` as of ``rematerialize``. ``alike``: programs by their
    operators, also of other models that have them."""

    def __init__(self, dynamic: bool | None, alike: dict[Any, Alike] | None = None) -> None:
        self.dynamic = dynamic
        self._kinds: dict[Signature, Kin] = {}
        self._alike = {} if alike is None else alike

    def alike(self, program: Program) -> Alike | None:
        """The programs with the operators of this one, which was captured by itself: calls whose sizes depend on numbers, such
        as the lengths of packed sequences, have no family."""
        if self.dynamic is False:
            return None
        key = operators(program)
        self._alike[key] = found = self._alike.pop(key, None) or Alike()
        if len(self._alike) > _MOST_KINDS:
            del self._alike[next(iter(self._alike))]
        return found

    def of(self, key: Signature, inputs: Sequence[torch.Tensor], states: int) -> tuple[Kin, Shapes] | tuple[None, None]:
        """The kind of a call with these flat inputs, of which the first ``states`` are the model's, and the others' shapes."""
        # Of distributed tensors the global sizes are in the program as well, of sparse ones the numbers of their entries.
        special = any(spec_of(tensor) is not None or tensor.layout is not torch.strided for tensor in inputs)
        shapes = None if special or self.dynamic is False else shapes_of(inputs[states:])
        if shapes is None:
            return None, None
        kind = kind_of(key, states), tuple(map(len, shapes))
        self._kinds[kind] = kin = self._kinds.pop(kind, None) or Kin(self.dynamic is True)
        if len(self._kinds) > _MOST_KINDS:
            del self._kinds[next(iter(self._kinds))]
        return kin, shapes
