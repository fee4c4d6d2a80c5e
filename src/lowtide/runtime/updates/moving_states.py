"""Optimizer states that lie in a second memory between the updates of their parameters.

Only large tensors of a state move, such as Adam's moments; counts stay. While a tensor is away, ``optimizer.state``
holds an ``AwayTensor``. Each parameter has its own room in the second memory, where its state lies until the next
update.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import Optimizer
from torch.utils import _pytree as pytree

from lowtide.memory.allocators import round_up
from lowtide.offload import Lease, SecondMemoryOf, open_memory
from lowtide.offload.interface import ALIGNMENT
from lowtide.program.optimizer_state import state_sizes
from lowtide.program.updates import StateMoves
from lowtide.runtime.updates.away import AwayTensor, Place, Transfer
from lowtide.runtime.updates.moving_gradients import begin_gradient
from lowtide.runtime.updates.optimizer_step import step_for

_LOG = logging.getLogger(__name__)
_LEAST_BYTES = ALIGNMENT  # smaller tensors do not move
_LEAST_SHARE = 1e-3  # of all movable bytes: smaller states do not move


@dataclass(slots=True, eq=False)
class FetchedState:
    """The movable tensors of the state of ``parameter`` while they are in memory, by key; empty before the first
    update."""

    parameter: torch.Tensor
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


class MovingStates:
    """The states of ``optimizer`` for ``parameters``, some of which may lie in the second memory of the given name.
    ``share``: the part of their bytes that is away between updates, largest states first; always 0 if not
    ``movable``."""

    def __init__(
        self, optimizer: Optimizer, memory: str, parameters: Sequence[torch.Tensor], movable: bool = True
    ) -> None:
        self.optimizer, self.share, self.movable = optimizer, 0.0, movable
        self._memory, self._parameters = memory, parameters
        # Parameters that were updated, and their gradients.
        self._kept: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._moving: list[torch.Tensor] = []  # parameters whose states move
        self._leases: dict[int, tuple[Lease, int]] = {}

    def movable_bytes(self, share: float) -> int:
        """Bytes of the states that move if ``share`` of all movable bytes are to be away."""
        return sum(self._sizes[id(parameter)] for parameter in self._chosen(share))

    def has_room(self, more_bytes: int = 0) -> bool:
        """Whether anything can move, and the second memory has room for all of it and ``more_bytes``."""
        chosen = self._chosen(1.0) if self.movable else []
        return bool(chosen) and self._opened(chosen[0]).free_bytes() >= sum(self._sizes.values()) + more_bytes

    def moves(self, parameters: Mapping[int, torch.Tensor], share: float) -> dict[int, StateMoves]:
        """How the states of ``parameters`` move (by position), for those that move if ``share`` of all bytes are to be
        away."""
        chosen = set(map(id, self._chosen(share)))
        fetch, store = Transfer("FetchState", self.fetch), Transfer("StoreState", self.store)
        return {
            position: StateMoves(fetch, store, self._sizes[id(parameter)])
            for position, parameter in parameters.items()
            if id(parameter) in chosen
        }

    def _chosen(self, share: float) -> list[torch.Tensor]:
        """The parameters whose states move if ``share`` of all bytes are to be away."""
        sizes, taken, found = self._sizes, 0, list[torch.Tensor]()
        whole = sum(sizes.values())
        for parameter in sorted(self._parameters, key=lambda one: -sizes.get(id(one), 0)) if share else ():
            size = sizes.get(id(parameter), 0)
            if taken >= share * whole or size < max(1, _LEAST_SHARE * whole):
                break
            taken += size
            found.append(parameter)
        return found

    @functools.cached_property
    def _sizes(self) -> dict[int, int]:
        """The movable bytes of the state of each trained parameter, by id."""
        known = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        return {
            id(one): movable_bytes(state_sizes(self.optimizer, one), one.device)
            for one in self._parameters
            if one.requires_grad and id(one) in known
        }

    def _opened(self, parameter: torch.Tensor) -> SecondMemoryOf:
        return open_memory(self._memory, parameter.device)

    def begin(self, share: float) -> None:
        """Keep ``share`` of the states away from now on."""
        self.share, self._moving = share, self._chosen(share)
        _LOG.info("%d bytes of states of an optimizer lie in the second memory", self.movable_bytes(share))
        self.send_away()

    def end(self) -> None:
        """Bring all states back, and free the room in the second memory."""
        self.bring_home(self._moving)
        self.share, self._moving = 0.0, []
        self._leases.clear()

    def fetch(self, parameter: torch.Tensor) -> Callable[[], FetchedState]:
        """Begin to fetch the state of ``parameter``. Returns a function that waits for it."""
        state = self._of(parameter)
        coming = {key: value.place.begin() for key, value in state.items() if isinstance(value, AwayTensor)}

        def end() -> FetchedState:
            return FetchedState(parameter, {key: come() for key, come in coming.items()})

        return end

    def update(self, parameter: torch.Tensor, fetched: FetchedState | None, step: Callable[[], None]) -> None:
        """Run ``step``, the optimizer's step for ``parameter`` alone, with its state in memory. Afterwards ``fetched``
        holds the tensors that move."""
        state = self._of(parameter)
        state.update({} if fetched is None else fetched.tensors)
        self.bring_home((parameter,))
        step()
        if fetched is not None:
            fetched.parameter = parameter
            fetched.tensors = {key: one for key, one in self._of(parameter).items() if _moves(one)}

    def store(self, fetched: FetchedState) -> Callable[[], None]:
        """Begin to store the state. Returns a function that waits for this. It raises an error and leaves the state in
        memory if the state cannot be written."""
        state, tensors = self._of(fetched.parameter), fetched.tensors
        sizes = list(map(_slot, tensors.values()))
        lease, offsets = self._lease(fetched.parameter, sum(sizes)), itertools.accumulate(sizes, initial=0)
        places = {key: Place(lease, offset, tensors[key]) for key, offset in zip(tensors, offsets, strict=False)}
        state.update({key: AwayTensor(tensors[key], place) for key, place in places.items()})

        def end() -> None:
            try:
                for place in places.values():
                    place.copy.left()
            except BaseException:
                state.update(tensors)
                raise
            finally:
                tensors.clear()

        return end

    def send_away(self) -> None:
        """Move states that are in memory but should be away to the second memory."""
        for parameter in self._moving:
            there = {key: one for key, one in self._of(parameter).items() if _moves(one)}
            for one in self._of(parameter).values():
                if isinstance(one, AwayTensor):  # some code may have looked at it
                    one.place.leave()
            if there:
                self.store(FetchedState(parameter, there))()

    def step_kept(self) -> None:
        """Run the optimizer's step for parameters with kept gradients that are away, or whose states move. It goes one
        parameter at a time, fetches the next one's data and stores the last one's meanwhile. The regular step that
        follows finds no gradients of these, until ``show_kept``."""
        self.show_kept()
        groups = {id(one): group for group in self.optimizer.param_groups for one in group["params"]}
        moving = set(map(id, self._moving))
        chosen = [one for one in self._parameters if id(one) in groups and one.grad is not None]
        chosen = [one for one in chosen if id(one) in moving or isinstance(one.grad, AwayTensor)]
        coming = [(self.fetch(parameter), begin_gradient(parameter)) for parameter in chosen[:1]]
        going: list[Callable[[], None]] = []
        with torch.no_grad():
            for parameter, following in itertools.zip_longest(chosen, chosen[1:]):
                fetch, begun = coming.pop()
                state, gradient = fetch(), begun()
                if going:
                    going.pop()()
                if following is not None:
                    coming.append((self.fetch(following), begin_gradient(following)))
                self._step_one(parameter, gradient, state if id(parameter) in moving else None, groups[id(parameter)])
                del gradient
                if id(parameter) in moving:
                    going.append(self.store(state))
        for end in going:
            end()

    def _step_one(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor | None,
        fetched: FetchedState | None,
        group: dict[str, Any],
    ) -> None:
        """Run the optimizer's step for ``parameter`` with its ``gradient``, which is in memory."""
        self._kept.append((parameter, parameter.grad))
        parameter.grad = gradient
        try:
            self.update(
                parameter, fetched, functools.partial(step_for, self.optimizer, group, parameter, self.optimizer.state)
            )
        finally:
            parameter.grad = None

    def show_kept(self) -> None:
        """Put kept gradients back into ``.grad``."""
        for parameter, gradient in self._kept:
            parameter.grad = gradient
        self._kept.clear()
        self.send_away()

    def bring_home(self, parameters: Iterable[torch.Tensor]) -> None:
        """Fetch the states of ``parameters`` for code that reads or writes them outside a planned pass."""
        for parameter in parameters:
            state = self._of(parameter)
            for key in [key for key, value in state.items() if isinstance(value, AwayTensor)]:
                state[key] = state[key].fetched()

    def _of(self, parameter: torch.Tensor) -> dict[str, Any]:
        found: dict[str, Any] = self.optimizer.state.get(parameter, {})
        return found

    def _lease(self, parameter: torch.Tensor, nbytes: int) -> Lease:
        """Room in the second memory for the state of a parameter."""
        lease, room = self._leases.get(id(parameter), (None, 0))
        if lease is None or room < nbytes:
            lease = self._opened(parameter).lease(nbytes)
            self._leases[id(parameter)] = lease, nbytes
        return lease


class StatesOfAll:
    """The states of all optimizers of one model, of which the same ``share`` is away."""

    def __init__(self, of: Sequence[MovingStates]) -> None:
        self._of = of

    @property
    def share(self) -> float:
        return max(one.share for one in self._of)

    def movable_bytes(self, share: float) -> int:
        return sum(one.movable_bytes(share) for one in self._of)

    def has_room(self) -> bool:
        """Whether anything can move, and there is room for all of it."""
        moving = [one for one in self._of if one.movable and one.movable_bytes(1.0)]
        before = itertools.accumulate((one.movable_bytes(1.0) for one in moving), initial=0)
        return bool(moving) and all(one.has_room(more) for one, more in zip(moving, before, strict=False))

    def moves(self, parameters: Mapping[int, torch.Tensor], share: float) -> dict[int, StateMoves]:
        moves = (one.moves(parameters, share) for one in self._of)
        return {position: move for each in moves for position, move in each.items()}

    def begin(self, share: float) -> None:
        for one in self._of:
            one.begin(share)

    def send_away(self) -> None:
        for one in self._of:
            one.send_away()


def movable_bytes(sizes: Iterable[int], device: torch.device) -> int:
    """The movable bytes of a state whose tensors have these sizes."""
    return sum(round_up(size, device) for size in sizes if size >= _LEAST_BYTES)


def saved_whole(_: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """A ``state_dict`` with the tensors that are away fetched."""
    here = functools.partial(pytree.tree_map_only, AwayTensor, AwayTensor.fetched)
    return {**saved, "state": {number: here(state) for number, state in saved["state"].items()}}


def _moves(value: Any) -> bool:
    plain = isinstance(value, torch.Tensor) and not isinstance(value, AwayTensor)
    return plain and value.nbytes >= _LEAST_BYTES


def _slot(tensor: torch.Tensor) -> int:
    return -(-tensor.untyped_storage().nbytes() // ALIGNMENT) * ALIGNMENT
