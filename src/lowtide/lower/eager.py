"""Lowers a schedule to a Python generator that runs it, operator by operator.

The generated function is one generator per call of the model::

    def step(inputs, tangents, written):
        v0, v1 = inputs[0], inputs[1]
        v2 = mm(v0, v1)                    # forward program; a ``Free`` is a ``del``
        yield [v2.detach()]                # the forward outputs
        v3 = tangents[0]
        v2 = mm(v0, v1)                    # a recomputation repeats the call
        yield [v4]                         # gradients, as soon as they are final, group by group

Tensors saved for the backward pass are locals of the suspended generator, so they need no bookkeeping, every call has its
own, and each is released where the schedule says.
"""

from __future__ import annotations

import functools
import itertools
import linecache
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from lowtide.ir import Compute, Fetch, Free, Offload, Op, RestoreRng, SaveRng, Schedule
from lowtide.ir.graph import FETCH_STATE_TARGET, OPTIMIZER_TARGET, SEND_GRADIENT_TARGET, TANGENT_TARGET, UPDATE_TARGET
from lowtide.ir.transfers import needs
from lowtide.lower.addresses import Addresses
from lowtide.lower.drawing import SAVE, Drawing
from lowtide.lower.gradient_groups import GradientGroup, group_gradients
from lowtide.lower.numbers import Numbers
from lowtide.lower.shared import constants_read, inner_outputs, updated
from lowtide.lower.under_way import UnderWay
from lowtide.memory.arena import made
from lowtide.offload import Room
from lowtide.program import generators, targets
from lowtide.program.overwrites import keeping, written_form
from lowtide.program.program import Program, Ref
from lowtide.program.scalars import SCALARS

Step = Generator[list[torch.Tensor], None, None]
_FILES = itertools.count()
# Targets that use the current contents of a parameter, changed since the forward pass or not.
_AS_IT_IS = (OPTIMIZER_TARGET, FETCH_STATE_TARGET, SEND_GRADIENT_TARGET)


@dataclass(frozen=True, slots=True, eq=False)
class Lowered:
    """``step(inputs, tangents, written)`` is the generator above; it empties ``inputs`` and ``tangents``.

    Op ids go to ``written`` as they begin to update inputs; ``None`` on a rerun: buffers and checks have their new values.
    ``gradient_groups[i]`` names the gradients of the i-th yield after the forward outputs; ``terms`` are, for each gradient,
    the flat input that it is of, and how many terms of the same came before it. ``tangents`` are the values of the gradients
    that arrive; ``random`` tells whether a generator is read. ``reads`` are the flat inputs that the program reads and does not
    update at the end of its forward pass, ``reads_after`` those of them that its backward pass reads (or views of them),
    ``reads_again`` inputs that recomputed forward ops read in it, ``reads_outputs`` the forward outputs that it reads;
    ``reads_constants``: constants that the forward pass reads, each with whether the backward pass does. ``at_once``: inputs
    updated in the midst of the forward pass; ``unseen``: all updated without a new version, but for running statistics, which
    nothing reads again. ``inner``: forward outputs that others depend on. ``addresses``: the arena's, reserved before a pass;
    the caller that resumes the generator ends the latest operator (``AddressTable.end``).
    """

    program: Program
    step: Callable[[list[torch.Tensor], list[torch.Tensor], list[int] | None], Step]
    source: str
    gradient_groups: tuple[GradientGroup, ...]
    terms: tuple[tuple[int, int], ...]
    tangents: tuple[int, ...]
    random: bool
    reads: tuple[int, ...]
    reads_after: tuple[int, ...]
    reads_again: tuple[int, ...]
    reads_constants: tuple[tuple[int, bool], ...]
    reads_outputs: tuple[int, ...]
    at_once: tuple[int, ...]
    unseen: tuple[int, ...]
    inner: tuple[int, ...]
    addresses: Addresses | None = None
    chains: dict[Any, Any] = field(default_factory=dict)  # see ``runtime.calls.chain``


def lower(
    program: Program,
    schedule: Schedule,
    addresses: Addresses | None = None,
    room: Room | None = None,
    *,
    beside: bool = False,
) -> Lowered:
    """Generate and compile the step function of ``schedule``, which allocates at ``addresses``. ``room``: slots in the second
    memory, for schedules that move storages. ``beside``: overlap collectives with compute, as in ``Costs``."""
    return _Generator(program, schedule, addresses, room, beside).lower()


class _Generator:
    def __init__(
        self, program: Program, schedule: Schedule, addresses: Addresses | None, room: Room | None, beside: bool
    ) -> None:
        self.program = program
        self.graph, self.schedule = program.graph, schedule
        self.addresses, self.room = addresses, room
        self.beside = beside
        self.under_way = UnderWay()
        self.begin = addresses.table.begin if addresses else None
        self.computed = 0
        self.lines: list[str] = []
        self.namespace: dict[str, Any] = {SAVE: generators.Draw}
        self._names: dict[Any, str] = {}
        self.numbers = Numbers(program, self._constant)
        self.tangents = self.graph.arriving
        self.live, self.handed = set[int](), set[int]()  # values that have a variable, storages whose gradient has left
        self.drawing = Drawing(program, self._constant)
        self.gradient_groups = group_gradients(program, schedule)

    def lower(self) -> Lowered:
        self._load_inputs()
        dead = self._external_last_reads()
        leaving = {group.after: group for group in self.gradient_groups}
        for index, step in enumerate(self.schedule.steps):
            if index == self.schedule.boundary:
                self._yield_outputs()
            self._step(step)
            self._drop(dead.get(index, ()))
            if index == len(self.schedule.steps) - 1:
                self.under_way.settle_all()
            if index in leaving:
                self._yield_gradients(leaving[index])
        if self.schedule.boundary == len(self.schedule.steps):
            self._yield_outputs()
        return self._compile()

    def _load_inputs(self) -> None:
        for position, value in enumerate(self.program.inputs):
            if value is not None:
                self.lines.append(f"v{value} = inputs[{position}]")
                self.live.add(value)
        for value, tensor in self.program.constants.items():
            self.lines.append(f"v{value} = {self._constant(tensor)}")
            self.live.add(value)
        self.lines.append("inputs.clear()")
        if self.schedule.moves:
            self.lines.append(f"away = {self._constant(self._room().lease)}()")

    def _external_last_reads(self) -> dict[int, list[int]]:
        """Return values in external storages, which the schedule does not free, by the step that reads them last."""
        last: dict[int, int] = {}
        for index, step in enumerate(self.schedule.steps):
            if isinstance(step, Compute):
                last.update(dict.fromkeys(self.graph.ops[step.op].inputs, index))
        keep = set(self.graph.forward_outputs) | set(self.graph.outputs)
        dead: dict[int, list[int]] = {}
        for value, index in last.items():
            external = self.graph.storages[self.graph.values[value].storage].external
            if external and value not in keep:
                dead.setdefault(index, []).append(value)
        return dead

    def _step(self, step: Any) -> None:
        self.under_way.settle(*needs(self.graph, step))
        if isinstance(step, Compute):
            if self.addresses is not None:
                self.lines.append(f"{self._constant(self.begin)}({self.computed})")
            self._compute(step.op, step.into)
            if self.addresses is not None and self.addresses.computes[self.computed].is_ambiguous:
                self._tell_apart(step.op, self.addresses.computes[self.computed].storages)
            self.computed += 1
        elif isinstance(step, Free):
            self._drop(self.graph.storages[step.storage].values)
        elif isinstance(step, Offload):
            slot, values = self._room().slots[step.storage], self._moving(step.storage)
            self.lines.append(f"o{step.storage} = away.offload({slot}, ({values}))")
            self.under_way.begin(functools.partial(self.lines.append, f"o{step.storage}.left()"), read=[step.storage])
        elif isinstance(step, Fetch):
            self.lines.append(f"{self._moving(step.storage)} = o{step.storage}.fetch()")
            self.live.update(self._made_by_base(step.storage))
            self.under_way.begin(functools.partial(self.lines.append, f"o{step.storage}.back()"), made=[step.storage])
        elif isinstance(step, SaveRng):
            self.lines.append(self.drawing.saved(self.graph.ops[step.op]))
        elif isinstance(step, RestoreRng):
            self.drawing.restored(step.op)

    def _room(self) -> Room:
        assert self.room is not None, "the schedule moves storages"
        return self.room

    def _made_by_base(self, storage: int) -> list[int]:
        """The values of a storage that come and go with it; views of them are formed again."""
        base = self.graph.storages[storage].base
        return [v for v in self.graph.storages[storage].values if self.graph.values[v].producer == base]

    def _moving(self, storage: int) -> str:
        return "".join(f"v{value}, " for value in self._made_by_base(storage)).rstrip()

    def _compute(self, op_id: int, into: int | None) -> None:
        op, call = self.graph.ops[op_id], self.program.calls[op_id]
        if op.target == TANGENT_TARGET:
            value = op.outputs[0]
            self.lines.append(f"v{value} = tangents[{self.tangents.index(value)}]")
            if value == self.tangents[-1]:
                self.lines.append("tangents.clear()")
            self.live.add(value)
            return
        kwargs = call.kwargs
        if into is None:
            target = keeping(call.target)
        else:  # the operator's form that writes into the storage of one of its inputs
            value = next(v for v in op.inputs if self.graph.values[v].storage == into)
            form = written_form(self.program, op_id, value)
            assert form is not None
            target, kwargs = form.target, {**kwargs, form.keyword: Ref(value)} if form.keyword else kwargs
        arguments = [self._argument(a) for a in call.args]
        arguments += [f"{name}={self._argument(a)}" for name, a in kwargs.items()]
        target, arguments, condition = self.drawing.due(op_id, target, arguments)
        if call.target is targets.expect:
            condition = "if written is not None: "
        elif call.target is targets.update:
            condition = f"if written is not None: written.append({op_id}); "
        begun = getattr(target, "begin", None) if self.beside and op.collective and into is None else None
        call_of = f"{self._constant(target if begun is None else begun)}({', '.join(arguments)})"
        if begun is None:
            self._assign(op, call.positions, condition, call_of)
            self.lines += self.drawing.ran(op_id)
        else:
            self.lines.append(f"c{op_id} = {call_of}")
            changed, read = self.graph.changed[op_id], self.graph.read[op_id]
            self.under_way.begin(functools.partial(self._wait, op), made=changed, read=read)

    def _wait(self, op: Op) -> None:
        """Wait for a collective that was begun, and bind its outputs."""
        self._assign(op, self.program.calls[op.id].positions, "", f"c{op.id}()")
        self.lines.append(f"del c{op.id}")

    def _assign(self, op: Op, positions: tuple[int, ...] | None, condition: str, expression: str) -> None:
        """Bind the outputs that have no variable yet; a recomputed output that is still alive keeps its tensor."""
        wanted = [v for v in op.outputs if v not in self.live and not self._left(v, op.id)]
        if op.target == UPDATE_TARGET:
            self.lines += [f"{condition}{expression}", *(f"v{value} = v{op.inputs[0]}" for value in wanted)]
        elif positions is None or not op.outputs:
            self.lines.append(f"{condition}v{wanted[0]} = {expression}" if wanted else f"{condition}{expression}")
        else:
            self.lines.append(f"{condition}t = {expression}")
            for value, position in zip(op.outputs, positions, strict=True):
                if value in wanted:
                    self.lines.append(f"v{value} = t[{position}]")
            self.lines.append("del t")
        self.live.update(wanted)

    def _tell_apart(self, op_id: int, storages: Iterable[int]) -> None:
        """Tell the arena which result of the op is which, since some have the same size."""
        values = {self.graph.values[v].storage: v for v in self.graph.ops[op_id].outputs if v in self.live}
        names = (f"v{values[storage]}" if storage in values else "None" for storage in storages)
        self.lines.append(f"{self._constant(made)}({', '.join(names)})")

    def _left(self, value: int, op_id: int) -> bool:
        """Whether ``op_id`` allocates the value's storage and the caller has it already."""
        storage = self.graph.values[value].storage
        return storage in self.handed and self.graph.storages[storage].base == op_id

    def _drop(self, values: Iterable[int]) -> None:
        names = [f"v{value}" for value in values if value in self.live]
        if names:
            self.lines.append(f"del {', '.join(names)}")
        self.live.difference_update(values)

    def _yield_outputs(self) -> None:
        self.under_way.settle(self.graph.storages_of(self.graph.forward_outputs))
        # Detached: the autograd engine marks what it is given, and a marked tensor would keep the generator alive.
        self.lines.append(f"out = [{', '.join(f'v{value}.detach()' for value in self.graph.forward_outputs)}]")
        later = self._reads_after()
        held = {self.graph.values[value].storage for value in self.graph.forward_outputs}
        self.handed |= held
        self._drop(v for s in held for v in self.graph.storages[s].values if v not in later)
        self.lines.append("yield out")
        self.lines.append("del out")

    def _yield_gradients(self, group: GradientGroup) -> None:
        values = [self.program.gradients[index][1] for index in group.gradients]
        self.under_way.settle(self.graph.storages_of(values))
        self.lines.append(f"out = [{', '.join(f'v{value}' for value in values)}]")
        for storage in (self.graph.values[value].storage for value in values):
            self.handed.add(storage)
            self._drop(self.graph.storages[storage].values)
        self.lines.append("yield out")

    def _reads_after(self, but: Collection[str] = (), again: bool = False) -> set[int]:
        """Return the values read after the boundary, except by targets ``but``; with ``again``, by forward ops alone."""
        steps = self.schedule.steps[self.schedule.boundary :]
        ops = (self.graph.ops[step.op] for step in steps if isinstance(step, Compute))
        last = self.graph.forward_ops if again else len(self.graph.ops)
        return {value for op in ops if op.id < last and op.target not in but for value in op.inputs}

    def _argument(self, argument: Any) -> str:
        if isinstance(argument, Ref):
            return f"v{argument.value}"
        if isinstance(argument, (list, tuple)):
            items = [self._argument(item) for item in argument]
            return f"[{', '.join(items)}]" if isinstance(argument, list) else f"({''.join(i + ', ' for i in items)})"
        if isinstance(argument, SCALARS):
            return self.numbers.name(argument.source)
        if argument is None or isinstance(argument, (bool, int, str)):
            return repr(argument)
        return self._constant(argument)

    def _constant(self, thing: Any) -> str:
        key = repr(thing) if type(thing) in (float, torch.device, torch.dtype) else id(thing)  # zeros have two signs
        if key not in self._names:
            stem = (getattr(thing, "__name__", "") if callable(thing) else "").split(".")[0]
            self._names[key] = f"{stem if stem.isidentifier() else 'c'}_{len(self._names)}"
            # For an overload, the function that it calls, without a Python call around it.
            self.namespace[self._names[key]] = thing._op if type(thing) is torch._ops.OpOverload else thing
        return self._names[key]

    def _compile(self) -> Lowered:
        source = "\n    ".join(["def step(inputs, tangents, written):", *self.numbers.lines(), *self.lines]) + "\n"
        filename = f"<lowtide step {next(_FILES)}>"
        linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
        exec(compile(source, filename, "exec"), self.namespace)
        after, again = self._storages(self._reads_after(but=_AS_IT_IS)), self._reads_after(again=True)
        last, at_once, unseen = updated(self.program)
        buffers = range(self.program.parameters, len(self.program.state_names))
        storages = [(i, self.graph.values[v].storage) for i, v in enumerate(self.program.inputs) if v is not None]
        outputs = enumerate(self.graph.forward_outputs)
        numbers = defaultdict[int, Iterator[int]](itertools.count)
        return Lowered(
            program=self.program,
            step=self.namespace["step"],
            source=source,
            gradient_groups=self.gradient_groups,
            terms=tuple((position, next(numbers[position])) for position, _ in self.program.gradients),
            tangents=self.tangents,
            random=any(op.random for op in self.graph.ops),
            reads=(*(i for i, storage in storages if storage not in last), *self.program.reduced),
            reads_after=(*(i for i, storage in storages if storage in after - last), *self.program.reduced),
            reads_again=tuple(i for i, value in enumerate(self.program.inputs) if value in again),
            reads_constants=constants_read(self.program, after),
            reads_outputs=tuple(i for i, value in outputs if self.graph.values[value].storage in after),
            at_once=tuple(i for i, storage in storages if storage in at_once),
            unseen=tuple(
                i for i, storage in storages if storage in unseen and (i not in buffers or storage in at_once)
            ),
            inner=inner_outputs(self.program),
            addresses=self.addresses,
        )

    def _storages(self, values: Iterable[int]) -> set[int]:
        return {self.graph.values[value].storage for value in values}
