"""Write a program anew with its regions as single operators."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from lowtide.fusion.body import Body, Line
from lowtide.fusion.kernel import Kernel, compile_kernels
from lowtide.fusion.kinds import Kind
from lowtide.fusion.proof import check_same
from lowtide.fusion.regions import Region, StorageReaders, find_regions, read_program
from lowtide.ir import Graph, Op, Phase, Storage, Value
from lowtide.program.overwrites import fills_its_storage, with_overwrites
from lowtide.program.program import Call, Program, Ref, TensorMeta
from lowtide.program.references import map_references


def fuse(program: Program, on_progress: Callable[[str, float], None] | None = None) -> Program:
    """``program`` with chains of pointwise operators and reductions as compiled kernels, see ``fusion.regions``.

    Values that only live inside kernels are gone; inputs, results, gradients and everything that the caller sees stay.
    The operators of a kernel that cannot be compiled, or computes something else, stay operators.
    """
    apart: frozenset[int] = frozenset()
    while True:
        reading = read_program(program, apart)
        regions = find_regions(reading)
        fused = _Rewrite(reading, regions).run()
        refused = compile_kernels(fused, on_progress)
        if not refused:
            check_same(program, fused)
            return with_overwrites(fused)
        apart |= _members(fused, regions, refused)


def rewrite(program: Program) -> Program:
    """As ``fuse``, before anything is compiled."""
    reading = read_program(program)
    return with_overwrites(_Rewrite(reading, find_regions(reading)).run())


def _members(fused: Program, regions: Sequence[Region], refused: frozenset[str]) -> frozenset[int]:
    """The operators of the refused kernels; regions and kernels are in the same order."""
    kernels = [call.target for call in fused.calls if isinstance(call.target, Kernel)]
    pairs = zip(sorted(regions, key=lambda region: region.anchor), kernels, strict=True)
    return frozenset(op for region, kernel in pairs if kernel.digest in refused for op in region.members)


class _Rewrite:
    def __init__(self, reading: StorageReaders, regions: list[Region]) -> None:
        self.reading = reading
        self.program = reading.program
        self.graph = reading.program.graph
        self.kinds = reading.kinds
        self.region_at = {region.anchor: region for region in regions}
        self.inside = {op for region in regions for op in region.members if self.kinds[op] is not Kind.VIEW}
        self.last_reader = self._last_readers(regions)
        self.ops: list[Op] = []
        self.calls: list[Call] = []
        self.values: list[Value] = []
        self.metas: list[TensorMeta] = []
        self.new: dict[int, int] = {}  # old value -> new value
        self.storages: dict[int, int] = {}
        self.bases: list[int | None] = []
        self.phase = Phase.FORWARD

    def run(self) -> Program:
        graph = self.graph
        for value in graph.inputs:
            self._value(value, None)
        for op in graph.ops[: graph.forward_ops]:
            self._emit(op)
        self._need(graph.forward_outputs)
        forward_ops = len(self.ops)
        self.phase = Phase.BACKWARD
        for op in graph.ops[graph.forward_ops :]:
            self._emit(op)
        self._need(graph.outputs)
        return self._program(forward_ops)

    def _last_readers(self, regions: list[Region]) -> dict[int, int]:
        """By storage, the last op or anchor that reads it in the fused program."""
        read = [(region.anchor, region.roots) for region in regions]
        read += [(op.id, op.inputs) for op in self.graph.ops if self._stays(op)]
        return {self.graph.values[value].storage: at for at, values in sorted(read) for value in values}

    def _stays(self, op: Op) -> bool:
        """Whether the op is called as it was: it is no view and in no kernel."""
        return self.kinds[op.id] is not Kind.VIEW and op.id not in self.inside

    def _emit(self, op: Op) -> None:
        region = self.region_at.get(op.id)
        if region is not None:
            self._kernel(region)
        elif self._stays(op):
            self._call(op)

    def _need(self, values: Iterable[int]) -> None:
        """Views are formed where they are first needed, since what they view may have moved."""
        for value in values:
            if value not in self.new:
                producer = self.graph.values[value].producer
                assert producer is not None
                self._call(self.graph.ops[producer])

    def _call(self, op: Op) -> None:
        self._need(op.inputs)
        call = self.program.calls[op.id]
        args, kwargs = map_references((call.args, call.kwargs), lambda ref: Ref(self.new[ref.value]))
        inputs = tuple(self.new[value] for value in op.inputs)
        self._append(op, op.target, inputs, op.outputs, Call(call.target, args, kwargs, call.positions))

    def _kernel(self, region: Region) -> None:
        self._need(region.roots)
        anchor = self.graph.ops[region.anchor]
        outputs = [value for value in anchor.outputs if self._is_read(value)] or list(anchor.outputs[:1])
        dying = self._dying(region, outputs)
        if dying is not None:  # it comes first, see ``Body.donated``
            others = (root for root in region.roots if root != dying)
            region = dataclasses.replace(region, roots=(dying, *others))
        kernel = Kernel(make_body(self.program, region, outputs, donated=dying is not None))
        inputs = tuple(self.new[value] for value in region.roots)
        positions = None if len(outputs) == 1 else tuple(range(len(outputs)))
        call = Call(kernel, tuple(map(Ref, inputs)), {}, positions)
        self._append(anchor, f"lowtide.{kernel.__qualname__}", inputs, outputs, call)

    def _dying(self, region: Region, outputs: Sequence[int]) -> int | None:
        """The root whose memory the kernel's one result could take: read for the last time, alone in its storage, as large."""
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

    def _append(self, op: Op, target: str, inputs: tuple[int, ...], outputs: Iterable[int], call: Call) -> None:
        number = len(self.ops)
        new = tuple(self._value(value, number) for value in outputs)
        self.ops.append(
            dataclasses.replace(
                op, id=number, target=target, inputs=tuple(dict.fromkeys(inputs)), outputs=new, phase=self.phase
            )
        )
        self.calls.append(call)

    def _value(self, old: int, producer: int | None) -> int:
        value = self.graph.values[old]
        if value.storage not in self.storages:
            self.storages[value.storage] = len(self.bases)
            self.bases.append(producer)
        number = len(self.values)
        self.values.append(
            dataclasses.replace(value, id=number, storage=self.storages[value.storage], producer=producer)
        )
        self.metas.append(self.program.metas[old])
        self.new[old] = number
        return number

    def _program(self, forward_ops: int) -> Program:
        members: list[list[int]] = [[] for _ in self.bases]
        for value in self.values:
            members[value.storage].append(value.id)
        old = self.graph
        graph = Graph(
            name=old.name,
            ops=tuple(self.ops),
            values=tuple(self.values),
            storages=tuple(Storage(i, base, tuple(members[i])) for i, base in enumerate(self.bases)),
            inputs=tuple(self.new[value] for value in old.inputs),
            forward_outputs=tuple(self.new[value] for value in old.forward_outputs),
            outputs=tuple(self.new[value] for value in old.outputs),
            forward_ops=forward_ops,
            fixed_bytes=old.fixed_bytes,
        )
        read = {value for op in self.ops for value in op.inputs} | set(graph.forward_outputs)
        inputs = tuple(None if value is None else self.new[value] for value in self.program.inputs)
        return dataclasses.replace(
            self.program,
            graph=graph,
            calls=tuple(self.calls),
            metas=tuple(self.metas),
            inputs=tuple(value if value in read else None for value in inputs),
            constants={self.new[value]: tensor for value, tensor in self.program.constants.items()},
            gradients=tuple((position, self.new[value]) for position, value in self.program.gradients),
        )


def make_body(program: Program, region: Region, outputs: Iterable[int], donated: bool = False) -> Body:
    """The region's operators with numbers of their own, for kernels to be told apart by."""
    local = {value: number for number, value in enumerate(region.roots)}
    lines = []
    for member in region.members:
        op, call = program.graph.ops[member], program.calls[member]
        args, kwargs = map_references((call.args, call.kwargs), lambda ref: Ref(local[ref.value]))
        local.update(zip(op.outputs, itertools.count(len(local))))
        lines.append(Line(Call(call.target, args, kwargs, call.positions), tuple(local[v] for v in op.outputs)))
    results = tuple(outputs)
    return Body(
        inputs=tuple(program.metas[value] for value in region.roots),
        lines=tuple(lines),
        results=tuple(local[value] for value in results),
        metas=tuple(program.metas[value] for value in results),
        donated=donated,
    )
