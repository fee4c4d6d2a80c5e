"""States of an optimizer that lie in a second memory between the updates of their parameters.

What moves of a parameter's state are its large tensors, as Adam's moments; counts stay. In ``optimizer.state`` a tensor that is
away is an ``AwayTensor``. Each parameter has room of its own in the second memory, where its state lies until the next update.
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
_LEAST_BYTES = ALIGNMENT  # of a tensor that moves
_LEAST_SHARE = 1e-3  # of all that may move, that the state of a parameter is


@dataclass(slots=True, eq=False)
class FetchedState:
    """What moves of the state of ``parameter``, by key, while it is there; nothing before its first update."""

    parameter: torch.Tensor
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


class MovingStates:
    """The states of ``optimizer`` for ``parameters``, some of which may lie in a second memory, by its name. ``share``: how
    many of them do between updates, by their bytes and from the largest on; none ever, where they are not ``movable``."""

    def __init__(
        self, optimizer: Optimizer, memory: str, parameters: Sequence[torch.Tensor], movable: bool = True
    ) -> None:
        self.optimizer, self.share, self.movable = optimizer, 0.0, movable
        self._memory, self._parameters = memory, parameters
        # Parameters that were stepped, and their gradients.
        self._kept: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._moving: list[torch.Tensor] = []  # parameters whose states move
        self._leases: dict[int, tuple[Lease, int]] = {}

    def movable_bytes(self, share: float) -> int:
        """Of the states that move where ``share`` of them are to."""
        return sum(self._sizes[id(parameter)] for parameter in self._chosen(share))

    def has_room(self, more_bytes: int = 0) -> bool:
        """Whether there is something to move, and the second memory has room for all of it, and for so much more."""
        chosen = self._chosen(1.0) if self.movable else []
        return bool(chosen) and self._opened(chosen[0]).free_bytes() >= sum(self._sizes.values()) + more_bytes

    def moves(self, parameters: Mapping[int, torch.Tensor], share: float) -> dict[int, StateMoves]:
        """Of ``parameters`` by position those whose state moves where ``share`` of all bytes are to, and how."""
        chosen = set(map(id, self._chosen(share)))
        fetch, store = Transfer("FetchState", self.fetch), Transfer("StoreState", self.store)
        return {
            position: StateMoves(fetch, store, self._sizes[id(parameter)])
            for position, parameter in parameters.items()
            if id(parameter) in chosen
        }

    def _chosen(self, share: float) -> list[torch.Tensor]:
        """The parameters whose states move where ``share`` of all bytes are to."""
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
        """By parameter that trains, the bytes of what may move of its state."""
        known = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        return {
            id(one): movable_bytes(state_sizes(self.optimizer, one), one.device)
            for one in self._parameters
            if one.requires_grad and id(one) in known
        }

    def _opened(self, parameter: torch.Tensor) -> SecondMemoryOf:
        return open_memory(self._memory, parameter.device)

    def begin(self, share: float) -> None:
        """Have ``share`` of the states away from now on."""
        self.share, self._moving = share, self._chosen(share)
        _LOG.info("%d bytes of states of an optimizer lie in the second memory", self.movable_bytes(share))
        self.send_away()

    def end(self) -> None:
        """All states are where they were."""
        self.bring_home(self._moving)
        self.share, self._moving = 0.0, []
        self._leases.clear()

    def fetch(self, parameter: torch.Tensor) -> Callable[[], FetchedState]:
        """Begin to fetch the state of ``parameter``. Called, what is returned waits for it."""
        state = self._of(parameter)
        coming = {key: value.place.begin() for key, value in state.items() if isinstance(value, AwayTensor)}

        def end() -> FetchedState:
            return FetchedState(parameter, {key: come() for key, come in coming.items()})

        return end

    def update(self, parameter: torch.Tensor, fetched: FetchedState | None, step: Callable[[], None]) -> None:
        """Run a ``step`` of the optimizer for ``parameter`` alone, with its state there; what moves of it is in ``fetched``
        afterwards."""
        state = self._of(parameter)
        state.update({} if fetched is None else fetched.tensors)
        self.bring_home((parameter,))
        step()
        if fetched is not None:
            fetched.parameter = parameter
            fetched.tensors = {key: one for key, one in self._of(parameter).items() if _moves(one)}

    def store(self, fetched: FetchedState) -> Callable[[], None]:
        """Begin to take the state back. Called, what is returned waits for that, and raises ``ExecutionError`` where it cannot
        be written: then it stays."""
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
        """Take states that are there, but should not be, to the second memory."""
        for parameter in self._moving:
            there = {key: one for key, one in self._of(parameter).items() if _moves(one)}
            for one in self._of(parameter).values():
                if isinstance(one, AwayTensor):  # of which somebody had a view
                    one.place.leave()
            if there:
                self.store(FetchedState(parameter, there))()

    def step_kept(self) -> None:
        """The optimizer's step for parameters whose gradients were kept, and are away or their states move, one after the
        other, while what the next needs comes and the former goes. The step that follows finds no gradients there, until
        ``show_kept``."""
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
        """The optimizer's step for ``parameter`` with its ``gradient``, which is in memory."""
        self._kept.append((parameter, parameter.grad))
        parameter.grad = gradient
        try:
            self.update(
                parameter, fetched, functools.partial(step_for, self.optimizer, group, parameter, self.optimizer.state)
            )
        finally:
            parameter.grad = None

    def show_kept(self) -> None:
        """Gradients that were kept are where they were."""
        for parameter, gradient in self._kept:
            parameter.grad = gradient
        self._kept.clear()
        self.send_away()

    def bring_home(self, parameters: Iterable[torch.Tensor]) -> None:
        """Fetch the states of ``parameters`` for whoever reads and writes them outside of a planned pass."""
        for parameter in parameters:
            state = self._of(parameter)
            for key in [key for key, value in state.items() if isinstance(value, AwayTensor)]:
                state[key] = state[key].fetched()

    def _of(self, parameter: torch.Tensor) -> dict[str, Any]:
        found: dict[str, Any] = self.optimizer.state.get(parameter, {})
        return found

    def _lease(self, parameter: torch.Tensor, nbytes: int) -> Lease:
        """Room for the state of a parameter."""
        lease, room = self._leases.get(id(parameter), (None, 0))
        if lease is None or room < nbytes:
            lease = self._opened(parameter).lease(nbytes)
            self._leases[id(parameter)] = lease, nbytes
        return lease


class StatesOfAll:
    """Of the optimizers of one model, each with its own: the same ``share`` of all."""

    def __init__(self, of: Sequence[MovingStates]) -> None:
        self._of = of

    @property
    def share(self) -> float:
        return max(one.share for one in self._of)

    def movable_bytes(self, share: float) -> int:
        return sum(one.movable_bytes(share) for one in self._of)

    def has_room(self) -> bool:
        """Whether there is something to move, and room for all of it."""
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
    """What may move of the state of a parameter, whose tensors are of these sizes."""
    return sum(round_up(size, device) for size in sizes if size >= _LEAST_BYTES)


def saved_whole(_: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """A ``state_dict`` whose tensors are all there."""
    here = functools.partial(pytree.tree_map_only, AwayTensor, AwayTensor.fetched)
    return {**saved, "state": {number: here(state) for number, state in saved["state"].items()}}


def _moves(value: Any) -> bool:
    plain = isinstance(value, torch.Tensor) and not isinstance(value, AwayTensor)
    return plain and value.nbytes >= _LEAST_BYTES


def _slot(tensor: torch.Tensor) -> int:
    return -(-tensor.untyped_storage().nbytes() // ALIGNMENT) * ALIGNMENT
