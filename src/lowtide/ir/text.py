"""Text forms of graphs and schedules, for reading, diffing and golden tests. The text of a graph is the key of cached plans.

Grammar, one item per line::

    graph    ::= "graph" string "fixed_bytes=" int
                 ["costs" "device=" string "rng_state_bytes=" int ["collectives_beside"]]
                 ["second_memory" string (key "=" int)*]                  keys are the fields of ``SecondMemory``
                 storage* ("value" value)*
                 "inputs" ref* "forward_outputs" ref* "outputs" ref*
                 "forward:" op* "backward:" op*
    storage  ::= "storage" "s"int ("external" | "op=" int) ["bytes=" int]
    op       ::= [value ("," value)*] "=" string "(" [ref ("," ref)*] ")" attribute*     its id is its position
    value    ::= ref ":s"int string type
    type     ::= word? "[" [int ("," int)*] "]"
    attribute::= "name=" string | "random" | "effect" | "collective" | "once" | "overwrites=" ref ("," ref)*
                 | "module=" string | "source=" string | "time_ns=" int | "workspace_bytes=" int
    ref      ::= "%"int
    string   ::= word | a JSON string
    schedule ::= step* "|" step*
    step     ::= "compute" int ["into s"int] | "free s"int | "save_rng" int | "restore_rng" int
               | "offload s"int | "fetch s"int

``bytes``, ``time_ns`` and ``workspace_bytes`` are present exactly if the ``costs`` line is. ``value`` lines are the values
that no op returns. Flags have the meaning of version 2 of the JSON form.
"""

from __future__ import annotations

import dataclasses
import json
import re

from lowtide.ir.costs import Costs
from lowtide.ir.graph import Graph, Op, Value
from lowtide.ir.schedule import Schedule
from lowtide.ir.serial import FLAGS, LISTS, ON_STORAGES, step_to_json

_WORD = r"[A-Za-z_][\w.]*"


def format_graph(graph: Graph, costs: Costs | None = None) -> str:
    """The text of ``graph``, with the numbers of ``costs`` where given."""
    text = [f"graph {_quoted(graph.name)} fixed_bytes={graph.fixed_bytes}"]
    if costs is not None:
        beside = " collectives_beside" if costs.collectives_beside else ""
        text.append(f"costs device={_quoted(costs.device)} rng_state_bytes={costs.rng_state_bytes}{beside}")
        if costs.second_memory is not None:
            facts = dataclasses.asdict(costs.second_memory)
            name = _quoted(facts.pop("name"))
            numbers = (f"{key}={int(fact)}" for key, fact in facts.items() if fact is not None)
            text.append(" ".join(("second_memory", name, *numbers)))
    for storage in graph.storages:
        size = "" if costs is None else f" bytes={costs.storage_bytes[storage.id]}"
        text.append(f"storage s{storage.id} {'external' if storage.external else f'op={storage.base}'}{size}")
    text += [f"value {_format_value(value)}" for value in graph.values if value.producer is None]
    text += [" ".join((name, *(f"%{value}" for value in getattr(graph, name)))) for name in LISTS]
    ops = [_format_op(graph, op, costs) for op in graph.ops]
    text += ["forward:", *ops[: graph.forward_ops], "backward:", *ops[graph.forward_ops :]]
    return "\n".join(text) + "\n"


def _format_value(value: Value) -> str:
    shape = ",".join(map(str, value.shape))
    return f"%{value.id}:s{value.storage} {_quoted(value.name)} {value.dtype}[{shape}]"


def _format_op(graph: Graph, op: Op, costs: Costs | None) -> str:
    outputs = ", ".join(_format_value(graph.values[value]) for value in op.outputs)
    inputs = ", ".join(f"%{value}" for value in op.inputs)
    parts = [f"{outputs} = {_quoted(op.target)}({inputs})".lstrip(), f"name={_quoted(op.name)}"]
    parts += [flag for flag in FLAGS if getattr(op, flag)]
    parts += [f"overwrites={','.join(f'%{value}' for value in op.overwrites)}"] if op.overwrites else []
    parts += [f"{key}={_quoted(text)}" for key in ("module", "source") if (text := getattr(op, key))]
    if costs is not None:
        parts += [f"time_ns={costs.time_ns[op.id]}", f"workspace_bytes={costs.workspace_bytes[op.id]}"]
    return " ".join(parts)


def _quoted(text: str) -> str:
    return text if re.fullmatch(_WORD, text, re.ASCII) else json.dumps(text)


def format_schedule(schedule: Schedule) -> str:
    """Return the text of ``schedule``, one step per line."""
    text = []
    for step in schedule.steps:
        kind, number, *into = step_to_json(step)
        line = f"{kind} s{number}" if kind in ON_STORAGES else f"{kind} {number}"
        text.append(line + "".join(f" into s{storage}" for storage in into))
    text.insert(schedule.boundary, "|")
    return "\n".join(text) + "\n"
