"""The program to be scheduled: operators, the values they return, and the storages behind those values.

Grammar::

    graph    ::= op*                       in execution order, the first ``forward_ops`` of them the forward pass
    op       ::= value* "=" target "(" value* ")" flag*
    value    ::= a tensor, which lives in exactly one storage
    storage  ::= bytes, behind one or more values (a base and its views)

Bytes are charged to storages, never to values, so a view costs nothing. Graph inputs (parameters, buffers, the call's
tensors) live in *external* storages: they were allocated before the pass began, cost nothing and are never freed.

Operators of lowtide's own have these targets:

- ``lowtide.tangent``, with the ``effect`` flag, first in the backward pass: produces the gradient that arrives for a forward
  output.
- ``lowtide.update``: writes a mutated buffer back. Its output, if any, is a value of the buffer's storage for later readers.
- ``lowtide.expect``: compares a truth value with the one that was traced, and ends the forward pass if they differ.
- ``lowtide.optimizer``: reads a parameter and its gradient and updates the parameter, which nothing reads afterwards. It also
  reads and writes the optimizer's state for the parameter if that lies in a second memory: ``lowtide.fetch_state`` fetches
  the state, ``lowtide.store_state`` stores it.
- ``lowtide.all_gather`` makes the parameters of a unit of a sharded model, ``lowtide.reduce_scatter`` takes their gradients.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

TANGENT_TARGET = "lowtide.tangent"
UPDATE_TARGET = "lowtide.update"
EXPECT_TARGET = "lowtide.expect"
OPTIMIZER_TARGET = "lowtide.optimizer"
FETCH_STATE_TARGET = "lowtide.fetch_state"
STORE_STATE_TARGET = "lowtide.store_state"
SEND_GRADIENT_TARGET = "lowtide.send_gradient"
STATE_TARGETS = (FETCH_STATE_TARGET, STORE_STATE_TARGET, SEND_GRADIENT_TARGET)
GATHER_TARGET = "lowtide.all_gather"
REDUCE_TARGET = "lowtide.reduce_scatter"
LOGITS_PIECE = "logits_piece_"
"""How the names of ops begin that compute the logits of a piece of a loss; its number and ``_of_`` how many follow."""


class Phase(enum.Enum):
    """The pass an operator belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True)
class Op:
    """One operator call.

    ``inputs`` and ``outputs`` are value ids; an operator with several results is one op with several values. ``random``
    ops are recomputed under the generator state of their first run; ``effect`` ops run exactly once, in order;
    ``once`` ops are never recomputed, since their inputs may have changed. ``collective`` ops communicate with other ranks,
    which must all run them in the same order, or with a second memory; they may be recomputed like any other op.
    ``overwrites``: inputs whose storage the op's only new storage, of the same size, may take over if nothing reads the input
    afterwards. ``module`` is the module path, ``source`` the user's ``file:line``.
    """

    id: int
    name: str
    target: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    phase: Phase
    random: bool = False
    effect: bool = False
    collective: bool = False
    once: bool = False
    overwrites: tuple[int, ...] = ()
    module: str = ""
    source: str = ""

    @property
    def recomputable(self) -> bool:
        return not (self.effect or self.once)


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor. ``producer`` is the op id that returns it, or ``None`` for a graph input."""

    id: int
    name: str
    storage: int
    producer: int | None
    dtype: str = ""
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Storage:
    """The bytes behind one or more values. ``base`` is the op that allocates it, ``None`` for an external storage."""

    id: int
    base: int | None
    values: tuple[int, ...]

    @property
    def external(self) -> bool:
        return self.base is None


@dataclass(frozen=True)
class Graph:
    """A forward and backward program.

    ``inputs``: values that exist before the pass. ``forward_outputs``: values handed to the caller at the
    forward/backward boundary; their storages stay resident from there to the end. ``outputs``: values that must be
    resident at the end (the gradients; for a plain DAG its outputs). ``forward_ops``: ``ops[:forward_ops]`` is the
    forward pass. ``fixed_bytes``: memory that is resident throughout and counts towards the budget.
    """

    name: str
    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    storages: tuple[Storage, ...]
    inputs: tuple[int, ...]
    forward_outputs: tuple[int, ...]
    outputs: tuple[int, ...]
    forward_ops: int
    fixed_bytes: int = 0

    @staticmethod
    def of_results(
        name: str,
        ops: Sequence[Op],
        producers: Sequence[int],
        outputs: Sequence[int],
        *,
        forward_ops: int | None = None,
        fixed_bytes: int = 0,
    ) -> Graph:
        """Make a program without inputs and views: op ``producers[n]`` makes value ``n``, in a storage of its own. All ops are
        in the forward pass unless ``forward_ops`` is given."""
        return Graph(
            name=name,
            ops=tuple(ops),
            values=tuple(Value(number, f"value_{number}", number, op) for number, op in enumerate(producers)),
            storages=tuple(Storage(number, op, (number,)) for number, op in enumerate(producers)),
            inputs=(),
            forward_outputs=(),
            outputs=tuple(outputs),
            forward_ops=len(ops) if forward_ops is None else forward_ops,
            fixed_bytes=fixed_bytes,
        )

    @functools.cached_property
    def owned(self) -> tuple[tuple[int, ...], ...]:
        """Per op, the storages that it allocates."""
        owned: list[list[int]] = [[] for _ in self.ops]
        for storage in self.storages:
            if storage.base is not None:
                owned[storage.base].append(storage.id)
        return tuple(map(tuple, owned))

    @functools.cached_property
    def read(self) -> tuple[tuple[int, ...], ...]:
        """Per op, the storages of its inputs."""
        return tuple(self.storages_of(op.inputs) for op in self.ops)

    @functools.cached_property
    def made(self) -> tuple[tuple[int, ...], ...]:
        """Per op, the storages of its outputs: those that it allocates, and those that it returns views of."""
        return tuple(self.storages_of(op.outputs) for op in self.ops)

    @functools.cached_property
    def touched(self) -> tuple[tuple[int, ...], ...]:
        """Per op, the storages of its inputs and outputs."""
        return tuple(self.storages_of((*op.inputs, *op.outputs)) for op in self.ops)

    @functools.cached_property
    def views(self) -> tuple[bool, ...]:
        """Per op, whether it allocates nothing and only forms views of existing storages."""
        plain = (op.outputs and op.recomputable and not (op.random or op.collective) for op in self.ops)
        return tuple(
            bool(may) and all(self.storages[one].base != op.id for one in made)
            for op, made, may in zip(self.ops, self.made, plain, strict=True)
        )

    @functools.cached_property
    def changed(self) -> tuple[tuple[int, ...], ...]:
        """Per op, the storages whose contents it may change: those of its outputs; for an ``effect`` op, its inputs' too; for a
        view, none."""
        return tuple(
            self.touched[op.id] if op.effect else () if view else made
            for op, view, made in zip(self.ops, self.views, self.made, strict=True)
        )

    @functools.cached_property
    def written(self) -> tuple[tuple[int, ...], ...]:
        """Per op, the ``changed`` storages that it does not allocate itself."""
        return tuple(
            tuple(one for one in changed if self.storages[one].base != op.id)
            for op, changed in zip(self.ops, self.changed, strict=True)
        )

    @functools.cached_property
    def arriving(self) -> tuple[int, ...]:
        """The incoming gradients of the forward outputs, in their order."""
        return tuple(op.outputs[0] for op in self.ops if op.target == TANGENT_TARGET)

    def storages_of(self, values: Iterable[int]) -> tuple[int, ...]:
        """The storages behind ``values``, each once."""
        return tuple(dict.fromkeys(self.values[value].storage for value in values))

    def __getstate__(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def without_places(self) -> Graph:
        """Return the graph without the source lines and module paths of its operators, on which no plan depends."""
        return replace(self, ops=tuple(replace(op, source="", module="") for op in self.ops))

    def without_names(self) -> Graph:
        """Return the graph without source lines, module paths and the names of ops and values. The tracer numbers those names,
        and counts symbolic sizes too, so they may differ between equal graphs."""
        ops = tuple(replace(op, name="", source="", module="") for op in self.ops)
        return replace(self, ops=ops, values=tuple(replace(value, name="") for value in self.values))

    def without_overwrites(self) -> Graph:
        """Return the graph without ``overwrites``, so that every result is new memory."""
        return replace(self, ops=tuple(replace(op, overwrites=()) for op in self.ops))

    def with_inputs_apart(self) -> Graph:
        """Return the graph with inputs that nothing is written into, each with the views of it, in storages of their own:
        whether they share memory is of no consequence. Storages are numbered anew, by their first values."""
        written = set[int]().union(*self.written)
        shared = {one.id for one in self.storages if one.external and one.id not in written}
        behind: dict[int, int] = {}  # a value in one of these, and the input that it is a view of
        members: dict[tuple[int, int | None], list[int]] = {}
        for value in self.values:
            if value.storage in shared:
                given = () if value.producer is None else self.ops[value.producer].inputs
                behind[value.id] = next(
                    (behind[one] for one in given if self.values[one].storage == value.storage), value.id
                )
            members.setdefault((value.storage, behind.get(value.id)), []).append(value.id)
        number = {value: index for index, values in enumerate(members.values()) for value in values}
        return replace(
            self,
            values=tuple(replace(value, storage=number[value.id]) for value in self.values),
            storages=tuple(
                Storage(index, self.storages[old].base, tuple(values))
                for index, ((old, _), values) in enumerate(members.items())
            ),
        )
