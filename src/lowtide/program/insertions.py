"""Operators added to a captured program: updates of parameters, collectives of sharded ones."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from lowtide.ir import Op, Phase
from lowtide.program.program import Call, Program


@dataclass(frozen=True, slots=True)
class Insertion:
    """``op`` and its call, to be inserted after operator ``after`` (-1: before all). Its id does not matter. ``owned``:
    the storages that it allocates. Its outputs are already values of the program."""

    after: int
    op: Op
    call: Call
    owned: tuple[int, ...] = ()


def inserted(program: Program, insertions: Iterable[Insertion], once: Collection[int] = ()) -> Program:
    """The program with these operators, those after the same operator in the given order, all with new ids. Of the
    former operators, those in ``once`` must not run again."""
    graph = program.graph
    following: dict[int, list[Insertion]] = {}
    for each in insertions:
        following.setdefault(each.after, []).append(each)
    ops: list[Op] = []
    calls: list[Call] = []
    bases: dict[int, int] = {}
    new: dict[int, int] = {}

    def insert(after: int) -> None:
        for each in following.get(after, ()):
            bases.update(dict.fromkeys(each.owned, len(ops)))
            ops.append(replace(each.op, id=len(ops)))
            calls.append(each.call)

    insert(-1)
    for op, call in zip(graph.ops, program.calls, strict=True):
        new[op.id] = len(ops)
        ops.append(replace(op, id=len(ops), once=op.once or op.id in once))
        calls.append(call)
        insert(op.id)
    producers = {value: op.id for op in ops for value in op.outputs}
    changed = replace(
        graph,
        ops=tuple(ops),
        values=tuple(replace(v, producer=producers.get(v.id)) for v in graph.values),
        storages=tuple(
            replace(s, base=bases.get(s.id, None if s.base is None else new.get(s.base))) for s in graph.storages
        ),
        forward_ops=sum(op.phase is Phase.FORWARD for op in ops),
    )
    return replace(program, graph=changed, calls=tuple(calls))
