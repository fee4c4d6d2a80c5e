"""Place stand-ins for numbers that change from call to call while a call is traced, and collect how they were used."""

from __future__ import annotations

import contextlib
import operator
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lowtide.capture.python_state.code.catching import catches_type_errors
from lowtide.capture.python_state.code.code_names import asks_for_types
from lowtide.capture.python_state.guards.compared import Comparisons, LateStandIn, StandIn
from lowtide.capture.python_state.guards.counters import assign
from lowtide.capture.python_state.guards.reads import Place, Read, identical
from lowtide.capture.python_state.guards.texts import TEXT_STAND_INS, named_in, text_stand_in
from lowtide.capture.python_state.paths import AttributePath
from lowtide.objects.places import current
from lowtide.objects.walk import ABSENT, content, reachable
from lowtide.objects.ways import alike
from lowtide.program.scalars import CHANGING, Operation, Operations, Taken, can_be_input, result_of

_PYTORCH = str(Path(torch.__file__).parent)
STAND_INS = (StandIn, LateStandIn, *TEXT_STAND_INS)


class ComparedNumber(NamedTuple):
    """The read of a number, and how it was compared."""

    read: Read
    comparisons: Comparisons


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """A function of the number at ``read``: calling it applies ``operations`` to the current value."""

    read: Read
    operations: Operations

    def __call__(self) -> Any:
        return result_of(self.operations, current(*self.read[:3]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Term) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> Any:
        return self.read.place, self.operations


class Numbers:
    """The changing numbers of one trace. ``every``: all that were read, and those computed from two of them. ``taken``: what
    operators took of them; ``scalars``: whether operators may; ``moved``: whether operators are given substitutes.
    ``refused``: places of numbers that are used in unrecorded ways; ``convert``: called for code that converts one."""

    def __init__(
        self,
        reads: Iterable[Read],
        scalars: bool,
        moved: bool,
        refused: Collection[Place],
        taken: list[Taken],
        convert: Callable[[types.FrameType], None],
    ) -> None:
        self._convert, self.taken = convert, taken
        self.every: list[ComparedNumber] = []
        self._scalars, self._moved, self._refused = scalars, moved, refused
        for read in reads:
            if read.kind != "computed" and read.place not in refused:
                self._add(read, current(*read[:3]))

    def places_taken(self) -> set[Place]:
        """The places of numbers that operators took, except drawn (random) ones."""
        taken = (one.source.number for one in self.taken)
        return {self.every[one].read.place for one in taken if isinstance(one, int) and one >= 0}

    def inputs(self, drawn: Callable[[int], int]) -> tuple[list[Read | int], list[Taken]]:
        """The numbers that become inputs of the program, and what operators took, renumbered to match. An input is given by its
        read or, if it was drawn, by ``drawn`` of its number. In the order in which operators took them."""
        order = [*dict.fromkeys(one.source.number for one in self.taken if isinstance(one.source.number, int))]
        places = {number: place for place, number in enumerate(order)}

        def in_order(one: Taken) -> Taken:
            return one._replace(source=one.source._replace(number=places.get(one.source.number, one.source.number)))

        return [self.every[one].read if one >= 0 else drawn(one) for one in order], [*map(in_order, self.taken)]

    def with_alike(self, places: set[Place]) -> set[Place]:
        """The ``places`` and, for arguments, the corresponding places in other items of the same lists."""
        groups = {(owner, alike(way)) for kind, owner, way in places if kind == "argument"}
        arguments = (one.read for one in self.every if one.read.kind == "argument")
        return places | {read.place for read in arguments if (id(read.owner), alike(read.name)) in groups}

    def texts(self, error: BaseException) -> set[Place]:
        """Places of the argument texts that may have caused an error; all of them if it names none."""
        texts = [one for one in self.every if one.comparisons.kind not in CHANGING and one.read.kind == "argument"]
        kinds = named_in(error)
        found = {one.read.place for one in texts if text_stand_in(one.comparisons.place) in kinds}
        return found or {one.read.place for one in texts}

    def _add(self, read: Read, value: Any) -> Comparisons:
        number = len(self.every) if self._scalars and type(value) in CHANGING and can_be_input(value) else None
        made = Comparisons(
            type(value), len(self.every), number=number, moved=self._moved, taken=self.taken, join=self._joined
        )
        made.convert = self._convert
        self.every.append(ComparedNumber(read, made))
        return made

    def _joined(self, function: Callable[[Any, Any], Any], one: StandIn, other: StandIn) -> Any:
        """The result of a function of two stand-ins: a new stand-in, or a recorded answer for a comparison."""
        reads = {id(known.comparisons): known.read for known in self.every}
        terms = tuple(Term(reads[id(each.comparisons)], each.operations) for each in (one, other))
        value = function(one.value, other.value)
        text = f"{function.__name__} of {' and '.join(term.read.text for term in terms)}"
        read = Read("computed", function, terms, value, text)
        if read.place in self._refused or type(value) not in (*CHANGING, bool):
            other.misused()
            raise one.misused()
        known = next((each.comparisons for each in self.every if each.read.place == read.place), None)
        made = known or self._add(read, value)
        if type(value) is not bool:
            return made.stand_in(value)
        made.answers[:] = [((Operation(operator.eq, value),), True)]
        return value


class CountedNumber(NamedTuple):
    """A number in an attribute of the model that a pass updates (counts on), and the operations that update it."""

    place: AttributePath
    operations: Operations

    def change(self, value: Any) -> tuple[str, Any]:
        """The change that the pass makes if it finds ``value`` there, see ``attribute_effects``."""
        return "set", result_of(self.operations, value)


@dataclass(frozen=True, slots=True)
class Standing:
    """The stand-ins placed for a run. ``counted``: owner id and name of numbers that the run updated. ``bare``: places where a
    run finds the plain numbers, by owner id and name. ``held``: numbers in copies of holders, by the copy's id; ``originals``:
    the same by the original's id."""

    numbers: Numbers
    counted: set[tuple[int, str]] = field(default_factory=set)
    bare: dict[int, dict[str, Comparisons]] = field(default_factory=dict)
    held: dict[int, _Held] = field(default_factory=dict)
    originals: dict[int, _Held] = field(default_factory=dict)

    def was_read(self, owner: Any, name: str | None) -> None:
        """The run has read this attribute of ``owner``, or all of them (``None``): note misuse if a plain number is there."""
        for own, comparisons in self.bare.get(id(owner), {}).items():
            comparisons.used_otherwise = comparisons.used_otherwise or name in (own, None)

    def was_reached(self, holder: Any) -> None:
        """The run has reached ``holder``, an original: note misuse of the plain numbers in it."""
        if id(holder) in self.originals:
            self.originals[id(holder)].misused()

    def ended(self) -> None:
        """The run and its backward pass are over: restore numbers in holders, and check for stand-ins that were kept."""
        for holder in self.held.values():
            holder.put(late=False)
        for _, comparisons in self.numbers.every:
            comparisons.ended()

    def left_in(self, some: Iterable[Any]) -> None:
        """Note misuse of numbers in holders that are reachable from ``some``, what the run left: the holder keeps them
        unseen."""
        for one in reachable(some, lambda one: True) if self.held else ():
            if id(one) in self.held:
                self.held[id(one)].misused()

    def until_ended(self) -> None:
        """From now on, in the backward pass, any use of numbers in holders counts as misuse."""
        for holder in self.held.values():
            holder.put(late=True)

    def met(self, function: types.FunctionType) -> None:
        """The run may call ``function``: note misuse if it asks for types, which tells stand-ins from numbers, or catches the
        ``TypeError`` that a C function raises for a stand-in of a text. NumPy's functions are exempt, since they use
        stand-ins in detectable ways first, as are PyTorch's wrappers (``torch.compiler.disable``), which ask for types of
        other things."""
        apart = str(function.__module__).startswith("numpy.") or function.__code__.co_filename.startswith(_PYTORCH)
        every = () if apart else self.numbers.every
        if every and asks_for_types(function.__code__):
            for _, comparisons in every:
                comparisons.used_otherwise = True
        texts = [comparisons for _, comparisons in every if comparisons.kind not in CHANGING]
        if texts and catches_type_errors(function.__code__):
            for comparisons in texts:
                comparisons.used_otherwise = True


@dataclass(frozen=True, slots=True)
class _Held:
    """The copy of a holder, with the values and comparisons of numbers in it, by key. ``before``: its content."""

    holder: Any
    before: tuple[Any, ...]
    numbers: dict[Any, tuple[Any, Comparisons]] = field(default_factory=dict)

    def misused(self) -> None:
        for _, comparisons in self.numbers.values():
            comparisons.used_otherwise = True

    def put(self, *, late: bool) -> None:
        """Put the numbers back or, if ``late``, stand-ins that notice any use."""
        for key, (value, comparisons) in self.numbers.items():
            assign("held", self.holder, key, LateStandIn(value, comparisons, ()) if late else value)


@contextlib.contextmanager
def standing_in(numbers: Numbers, copies: Mapping[int, tuple[Any, Any]]) -> Iterator[Standing]:
    """Inside the context, stand-ins replace the numbers in the copies of their owners. The originals keep the numbers, and the
    copies get them back afterwards. ``copies``: pairs of original and copy, by the copy's id."""
    copy_of = {id(original): copied for original, copied in copies.values()}
    standing = Standing(numbers)
    put = []
    for read, comparisons in numbers.every:
        if read.kind in ("argument", "computed"):  # passed to the run, or computed by it
            continue
        kind, original, name = read.own
        owner = copy_of.get(id(original), ABSENT)
        value = ABSENT if owner is ABSENT else current(kind, owner, name)
        if kind == "held" and type(value) is StandIn:  # already placed through another path
            continue
        known = comparisons.kind in CHANGING and type(value) is comparisons.kind and value == current(*read[:3])
        if owner is original or not known:
            comparisons.used_otherwise = True  # not copied, or another value
            continue
        if kind == "held":
            held = standing.held.setdefault(id(owner), _Held(owner, content(owner) or ()))
            held.numbers[name] = value, comparisons
            standing.originals[id(original)] = held
        else:
            standing.bare.setdefault(id(original), {})[name] = comparisons
        assign(kind, owner, name, comparisons.stand_in(value))
        put.append((kind, owner, name, value, comparisons))
    try:
        yield standing
    finally:
        for kind, owner, name, value, comparisons in put:
            left = current(kind, owner, name)
            if type(left) is StandIn and left.comparisons.tensor is not None:  # set after calls, from a tensor
                continue
            if type(left) is StandIn:
                standing.counted.update({(id(owner), name)} if comparisons.count(left) else ())
                assign(kind, owner, name, value)
            del left
            if kind != "held":
                standing.bare.setdefault(id(owner), {})[name] = comparisons
        for held in standing.held.values():
            if not identical(held.before, content(held.holder) or ()):
                held.misused()
