"""Rewrite a program with its regions as single operators."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from lowtide.fusion.body import Body, Line
from lowtide.fusion.kernel import Kernel, compile_kernels
from lowtide.fusion.kinds import Kind
from lowtide.fusion.proof import check_same
from lowtide.fusion.regions import Region, StorageReaders, find_regions, read_program
from lowtide.ir import Op, Phase, Storage
from lowtide.program.overwrites import fills_its_storage, with_overwrites
from lowtide.program.program import Call, Program, Ref
from lowtide.program.references import map_references


def fuse(program: Program) -> Program:
    """``program`` with chains of pointwise operators and reductions as compiled kernels, see ``fusion.regions``.

    Values that only live inside kernels disappear. Inputs, results, gradients and all that the caller sees stay. If a
    kernel cannot be compiled, or its results differ, its operators stay operators.
    """
    apart: frozenset[int] = frozenset()
    while True:
        rewriting = _Rewrite(read_program(program, apart))
        fused = rewriting.run()
        refused = compile_kernels(fused)
        if not refused:
            check_same(program, fused)
            return with_overwrites(fused)
        apart |= rewriting.members(refused)


def rewrite(program: Program) -> Program:
    """As ``fuse``, without compilation."""
    return with_overwrites(_Rewrite(read_program(program)).run())


class _Rewrite:
    """Builds the new program. ``steps``: its operators in order, on the values of the old program."""

    def __init__(self, reading: StorageReaders) -> None:
        self.reading = reading
        self.program = reading.program
        self.graph = reading.program.graph
        self.region_at = {region.anchor: region for region in find_regions(reading)}
        self.inside = {op for region in self.region_at.values() for op in region.members}
        read = [(region.anchor, region.roots) for region in self.region_at.values()]
        read += [(op.id, op.inputs) for op in self.graph.ops if self._stays(op)]
        # The last op or anchor that reads a storage in the fused program.
        self.last_reader = {self.graph.values[value].storage: at for at, values in sorted(read) for value in values}
        self.steps: list[tuple[Op, Call]] = []
        self.formed = set(self.graph.inputs)

    def run(self) -> Program:
        forward = self.graph.forward_ops
        self._emit(self.graph.ops[:forward], self.graph.forward_outputs)
        forward_ops = len(self.steps)
        self._emit(self.graph.ops[forward:], self.graph.outputs)
        return _renumbered(self.program, self.steps, forward_ops)

    def members(self, refused: frozenset[str]) -> frozenset[int]:
        """The operators of the refused kernels."""
        kernels = {op.id: call.target for op, call in self.steps if isinstance(call.target, Kernel)}
        anchors = (anchor for anchor, kernel in kernels.items() if kernel.digest in refused)
        return frozenset(op for anchor in anchors for op in self.region_at[anchor].members)

    def _stays(self, op: Op) -> bool:
        """Whether the op stays a call: it is not a view and not in a kernel."""
        return self.reading.kinds[op.id] is not Kind.VIEW and op.id not in self.inside

    def _emit(self, ops: Iterable[Op], results: Iterable[int]) -> None:
        for op in ops:
            if op.id in self.region_at:
                self._kernel(op, self.region_at[op.id])
            elif self._stays(op):
                self._call(op)
        self._need(results)

    def _need(self, values: Iterable[int]) -> None:
        """Form views where they are first needed: their base may be produced at another place now."""
        for value in values:
            if value not in self.formed:
                producer = self.graph.values[value].producer
                assert producer is not None
                self._call(self.graph.ops[producer])

    def _call(self, op: Op) -> None:
        self._need(op.inputs)
        self._add(op, self.program.calls[op.id])

    def _add(self, op: Op, call: Call) -> None:
        self.steps.append((op, call))
        self.formed.update(op.outputs)

    def _kernel(self, anchor: Op, region: Region) -> None:
        self._need(region.roots)
        outputs = tuple(filter(self._is_read, anchor.outputs)) or anchor.outputs[:1]
        dying = self._dying(region, outputs)
        if dying is not None:  # put it first, see ``Body.donated``
            region = dataclasses.replace(region, roots=(dying, *(root for root in region.roots if root != dying)))
        kernel = Kernel(make_body(self.program, region, outputs, donated=dying is not None))
        positions = None if len(outputs) == 1 else tuple(range(len(outputs)))
        op = dataclasses.replace(anchor, target=f"lowtide.{kernel.__qualname__}", inputs=region.roots, outputs=outputs)
        self._add(op, Call(kernel, tuple(map(Ref, region.roots)), {}, positions))

    def _dying(self, region: Region, outputs: Sequence[int]) -> int | None:
        """The root whose memory the kernel's only result could take: last read here, alone in its storage, and of the
        same size."""
        metas, values = self.program.metas, self.graph.values
        if len(outputs) != 1 or not fills_its_storage(metas[outputs[0]]):
            return None
        size = (metas[outputs[0]].dtype, metas[outputs[0]].storage_bytes)
        read = Counter(values[root].storage for root in region.roots)
        for root in region.roots:
            storage = values[root].storage
            inside = not self.graph.storages[storage].external and storage not in self.reading.handed
            dies = self.last_reader[storage] == region.anchor and read[storage] == 1
            alike = (metas[root].dtype, metas[root].storage_bytes) == size and fills_its_storage(metas[root])
            if inside and dies and alike:
                return root
        return None

    def _is_read(self, value: int) -> bool:
        storage = self.graph.values[value].storage
        return storage in self.reading.handed or bool(self.reading.readers[storage])


def _renumbered(program: Program, steps: Sequence[tuple[Op, Call]], forward_ops: int) -> Program:
    """A program of these operators, with values of ``program`` renumbered; values that no operator returns are left
    out."""
    old = program.graph
    producers = {value: number for number, (op, _) in enumerate(steps) for value in op.outputs}
    order = [*old.inputs, *producers]
    new = {value: number for number, value in enumerate(order)}
    members: dict[int, list[int]] = {}  # old storage -> old values
    for value in order:
        members.setdefault(old.values[value].storage, []).append(value)
    storages = {storage: number for number, storage in enumerate(members)}

    def moved(values: Iterable[int]) -> tuple[int, ...]:
        return tuple(new[value] for value in values)

    def at(number: int, op: Op) -> Op:
        phase = Phase.FORWARD if number < forward_ops else Phase.BACKWARD
        inputs = moved(dict.fromkeys(op.inputs))
        return dataclasses.replace(op, id=number, phase=phase, inputs=inputs, outputs=moved(op.outputs))

    graph = dataclasses.replace(
        old,
        ops=tuple(at(number, op) for number, (op, _) in enumerate(steps)),
        values=tuple(
            dataclasses.replace(each, id=new[each.id], storage=storages[each.storage], producer=producers.get(each.id))
            for each in map(old.values.__getitem__, order)
        ),
        storages=tuple(
            Storage(number, producers.get(values[0]), moved(values)) for number, values in enumerate(members.values())
        ),
        inputs=moved(old.inputs),
        forward_outputs=moved(old.forward_outputs),
        outputs=moved(old.outputs),
        forward_ops=forward_ops,
    )
    read = {*graph.forward_outputs, *(value for op in graph.ops for value in op.inputs)}
    return dataclasses.replace(
        program,
        graph=graph,
        calls=tuple(_with_numbers(call, new) for _, call in steps),
        metas=tuple(program.metas[value] for value in order),
        inputs=tuple(new[value] if value is not None and new[value] in read else None for value in program.inputs),
        constants={new[value]: tensor for value, tensor in program.constants.items()},
        gradients=tuple((position, new[value]) for position, value in program.gradients),
    )


def _with_numbers(call: Call, numbers: Mapping[int, int]) -> Call:
    args, kwargs = map_references((call.args, call.kwargs), lambda ref: Ref(numbers[ref.value]))
    return dataclasses.replace(call, args=args, kwargs=kwargs)


def make_body(program: Program, region: Region, outputs: Sequence[int], donated: bool = False) -> Body:
    """The region's operators with local value numbers, so that equal kernels have equal bodies."""
    local = {value: number for number, value in enumerate(region.roots)}
    lines = []
    for member in region.members:
        returned, call = program.graph.ops[member].outputs, _with_numbers(program.calls[member], local)
        local.update(zip(returned, itertools.count(len(local))))
        lines.append(Line(call, tuple(local[value] for value in returned)))
    return Body(
        inputs=tuple(program.metas[value] for value in region.roots),
        lines=tuple(lines),
        results=tuple(local[value] for value in outputs),
        metas=tuple(program.metas[value] for value in outputs),
        donated=donated,
    )
