"""One forward pass of a program that shares a step with others, and the gradients it leaves for those before it."""

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
    """A forward pass of the current step.

    - ``key``: which graph it is, and how often that ran before in the step.
    - ``between_bytes``: bytes that no graph held when it began; ``backward_between_bytes``: when its backward pass
      began, if known.
    - ``gradients``: those that its backward pass leaves, as bytes and owner: the id of a leaf, the key of a forward
      pass that returned the tensor, or ``None`` if unknown.
    - ``beside``: keys of the passes that waited for their backward pass when it began. ``waiting``: the same, for a
      pass with both its passes inside another pass, or before the call that it is a part of ends (a sampler that
      follows gradients). ``None``: all passes before it wait.
    - ``released_bytes``: memory that only plans need: copies, and arguments that nothing else held after the forward
      pass.
    """

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
        """Whether it is the same program among the same passes, as in another step."""
        return self.entry is other.entry and (self.gradients, self.waiting) == (other.gradients, other.waiting)

    @property
    def between(self) -> tuple[int, int]:
        """Bytes that no graph held in its forward pass and in its backward pass. Until the latter begins, both are the
        former."""
        backward = self.backward_between_bytes
        return self.between_bytes, self.between_bytes if backward is None else backward


class Passes(list[ForwardPass]):
    """The forward passes of a step, in order. New ones are appended."""

    def __init__(self, passes: Iterable[ForwardPass] = ()) -> None:
        super().__init__(passes)
        self._left: list[int] = []

    def pending(self) -> list[ForwardPass]:
        return [one for one in self if one.is_pending]

    def begin_backward(self, one: ForwardPass, early: bool) -> None:
        """The backward pass of ``one`` begins. ``early``: inside the call that ``one`` is a part of. Passes that began
        later and still wait count it as waiting."""
        if early and one in self and all(later.waiting is not None for later in self[self.index(one) + 1 :]):
            one.waiting, self._left = one.beside, []

    def stay(self) -> None:
        """The call has ended: passes that still wait (retained graphs) stay in memory beside later ones."""
        for one in self.pending():
            one.waiting = None

    def left_bytes(self) -> list[int]:
        """As ``left_gradient_bytes`` without sums, cached for consecutive backward passes."""
        if len(self._left) != len(self):
            self._left = left_gradient_bytes(self, sums=False)
        return self._left


def gradients_of(
    member: Member, inputs: Sequence[torch.Tensor], ran: Sequence[ForwardPass]
) -> Iterator[tuple[int, int | tuple[int, int] | None]]:
    """The ``ForwardPass.gradients`` of a pass of ``member`` on ``inputs``, after the passes ``ran``."""
    makers = {id(call): one.key for one in ran if (call := one.call()) is not None}
    for position, nbytes in member.gradient_bytes:
        tensor = inputs[position]
        yield nbytes, id(tensor) if tensor.grad_fn is None else makers.get(id(maker_of(tensor)))


def note_released(waiting: Sequence[ForwardPass], member: Callable[[ForwardPass], Member]) -> None:
    """Set ``released_bytes`` of waiting passes; their backward pass is about to begin. A tensor given to several passes
    counts once, at the first."""
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
    """For each pass, the places of those that wait for their backward pass while it runs."""
    places = {one.key: place for place, one in enumerate(ran)}
    return [
        tuple(other for other in range(place) if ran[other].waiting is None)
        if one.waiting is None
        else tuple(places[key] for key in one.waiting if key in places)
        for place, one in enumerate(ran)
    ]


def left_gradient_bytes(ran: Sequence[ForwardPass], sums: bool = True) -> list[int]:
    """For each pass, the bytes of gradients that exist when its backward pass begins, left by earlier backward passes.
    With ``sums``, also the new sum if it adds to one of them. Not for passes inside another pass: there, all memory is
    measured."""
    places: dict[object, int] = {one.key: place for place, one in enumerate(ran)}
    left, staying, leaves = [0] * len(ran), 0, set[object]()
    waiting = [0] * len(ran)  # bytes of gradients for this pass's results
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
    """Places in ``ran`` in the order of their backward passes: in reverse, except for those inside other passes. These
    keep their order and come when the passes that they do not wait for are over."""
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
    """Add passes of modules that ``may_run`` (by id) but have not run yet, such as dropped layers: like those of their
    kind in the same list. ``in_order``: all parts in the order of the model."""
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
