"""A forward pass of one of several programs in a step, and what it leaves for those before it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from lowtide.program.sizes import held_bytes
from lowtide.runtime.calls.arriving import is_held_by_lists
from lowtide.runtime.calls.call import ModelCall, maker_of
from lowtide.runtime.planned import Planned
from lowtide.runtime.programs.entry import Entry
from lowtide.sharing import Member


@dataclasses.dataclass(slots=True, eq=False)
class ForwardPass:
    """A forward pass of the current step. ``between_bytes`` were held by no graph when it began, and
    ``backward_between_bytes`` when its backward pass did, as far as that is known. ``gradients`` are those that its backward
    pass leaves, each with whom it is for: the id of a leaf, the key of a forward pass that returned it, or ``None`` where
    nobody knows. ``key``: which graph it is, and how often it ran before in the step. ``beside``: the keys of those that
    waited for their backward passes when it began. ``waiting``: the same, of a pass that has both of its own within another
    one, or before the call that it is a part of ends (a sampler that follows gradients); ``None`` where all before it do.
    ``released_bytes``: what only plans need: copies, and arguments that nobody else held at the end of the forward pass."""

    key: tuple[int, int]
    graph: Planned
    entry: Entry
    call: Callable[[], ModelCall | None]  # a weak reference
    between_bytes: int
    gradients: tuple[tuple[int, int | tuple[int, int] | None], ...] = ()
    backward_between_bytes: int | None = None
    waiting: tuple[tuple[int, int], ...] | None = None
    beside: tuple[tuple[int, int], ...] = ()
    released_bytes: int = 0

    @property
    def is_pending(self) -> bool:
        """Whether it still holds what its backward pass needs."""
        found = self.call()
        return found is not None and found.generator is not None

    def is_like(self, other: ForwardPass) -> bool:
        """Whether it is the same program among the same others, as in another step."""
        return self.entry is other.entry and (self.gradients, self.waiting) == (other.gradients, other.waiting)

    @property
    def between(self) -> tuple[int, int]:
        """Bytes held by no graph in its forward and in its backward pass; before that is over, as in the forward pass."""
        backward = self.backward_between_bytes
        return self.between_bytes, self.between_bytes if backward is None else backward


class Passes(list[ForwardPass]):
    """Those of a step, in order, which are added at the end."""

    def __init__(self, passes: Iterable[ForwardPass] = ()) -> None:
        super().__init__(passes)
        self._left: list[int] = []

    def pending(self) -> list[ForwardPass]:
        return [one for one in self if one.is_pending]

    def begin_backward(self, one: ForwardPass, early: bool) -> None:
        """``early``: in the call that ``one`` is a part of. Those that began after it and still wait count it in."""
        if early and one in self and all(later.waiting is not None for later in self[self.index(one) + 1 :]):
            one.waiting, self._left = one.beside, []

    def stay(self) -> None:
        """The call has ended: what still waits (its graph is retained) does so beside what follows."""
        for one in self.pending():
            one.waiting = None

    def left_bytes(self) -> list[int]:
        """See ``left_gradient_bytes``, without sums; worked out once for the backward passes that follow each other."""
        if len(self._left) != len(self):
            self._left = left_gradient_bytes(self, sums=False)
        return self._left


def gradients_of(
    member: Member, inputs: Sequence[torch.Tensor], ran: Sequence[ForwardPass]
) -> Iterator[tuple[int, int | tuple[int, int] | None]]:
    """Of a pass of ``member`` on ``inputs`` after those that ``ran``, see ``ForwardPass``."""
    makers = {id(call): one.key for one in ran if (call := one.call()) is not None}
    for position, nbytes in member.gradient_bytes:
        tensor = inputs[position]
        yield nbytes, id(tensor) if tensor.grad_fn is None else makers.get(id(maker_of(tensor)))


def note_released(waiting: Sequence[ForwardPass], member: Callable[[ForwardPass], Member]) -> None:
    """The ``released_bytes`` of passes that wait for their backward passes, which is about to begin: of a tensor that several
    were given, those of the first."""
    given = [(one, call, {*member(one).held_inputs}) for one in waiting if (call := one.call()) is not None]
    owners = Counter(id(tensor) for _, call, _ in given for tensor in call.inputs)
    read = {id(tensor) for _, call, held in given for i, tensor in enumerate(call.inputs) if i not in held}
    for one, call, held in given:
        inputs, one.released_bytes = call.inputs, held_bytes(call.copies.values())
        for i in held:
            if id(inputs[i]) not in read and is_held_by_lists(inputs, i, owners[id(inputs[i])]):
                one.released_bytes += inputs[i].untyped_storage().nbytes()
                read.add(id(inputs[i]))


def waiting_places(ran: Sequence[ForwardPass]) -> list[tuple[int, ...]]:
    """For each of ``ran``, which of them wait for their backward passes while it runs."""
    places = {one.key: place for place, one in enumerate(ran)}
    return [
        tuple(other for other in range(place) if ran[other].waiting is None)
        if one.waiting is None
        else tuple(places[key] for key in one.waiting if key in places)
        for place, one in enumerate(ran)
    ]


def left_gradient_bytes(ran: Sequence[ForwardPass], sums: bool = True) -> list[int]:
    """For each of ``ran``, bytes of the gradients that those whose backward pass is before its own have left when that begins;
    with ``sums``, also of the sum where it adds to one. What is there where a pass within another one begins is measured."""
    places: dict[object, int] = {one.key: place for place, one in enumerate(ran)}
    left, staying, leaves = [0] * len(ran), 0, set[object]()
    waiting = [0] * len(ran)  # for what this one returned
    for place in _backward_order(ran):
        if ran[place].waiting is None:
            left[place] = staying + sum(waiting[:place])
            if sums:
                left[place] += max((nbytes for nbytes, owner in ran[place].gradients if owner in leaves), default=0)
        for nbytes, owner in ran[place].gradients:
            if owner in places:
                waiting[places[owner]] += nbytes
            elif owner not in leaves:
                staying += nbytes
                if isinstance(owner, int):
                    leaves.add(owner)
    return left


def _backward_order(ran: Sequence[ForwardPass]) -> list[int]:
    """Places in ``ran`` in the order of their backward passes: in reverse, but for those within others, which come in their
    order where those that they do not wait for are over."""
    order = [place for place in reversed(range(len(ran))) if ran[place].waiting is None]
    for place, one in enumerate(ran):
        if one.waiting is not None:
            waits = {other.key for other in ran if other.waiting is None} & {*one.waiting}
            after = next((i for i, other in enumerate(order) if ran[other].key in waits), len(order))
            order.insert(after, place)
    return order


def with_siblings(
    passes: list[ForwardPass], may_run: Mapping[int, Planned], in_order: Callable[[], Iterable[Planned]]
) -> list[ForwardPass]:
    """With passes of modules that ``may_run``, by their ids, but have not yet, such as dropped layers: as those of their kind
    in the same list. ``in_order``: all modules, in that of the model."""
    met = {one.key[0] for one in passes}
    like = {one.graph.kind: one for one in passes if one.graph.kind}
    missing = {part: like[part.kind] for key, part in may_run.items() if key not in met and part.kind in like}
    if not missing:
        return passes
    parts, found = list(in_order()), list(passes)
    numbers = {part: number for number, part in enumerate(parts)}
    for number, part in enumerate(parts):
        if part in missing:
            after = [place for place, one in enumerate(found) if numbers.get(one.graph, number) < number]
            one = dataclasses.replace(missing[part], key=(id(part), 0), call=lambda: None)
            found.insert(after[-1] + 1 if after else 0, one)
    return found
