"""``parameter.data = value`` in Dynamo's graphs.

Dynamo represents it as ``set_``, which gives the parameter the value's memory, with the version reset. If the value has
the same layout and nothing else reads it, the parameter keeps its memory and the values are copied instead: the result
is the same.
"""

from __future__ import annotations

import torch
from torch import fx

from lowtide.program.layouts import memory_of


def write_assigned_data(module: fx.GraphModule) -> None:
    """Replace assignments to ``.data`` in the graph by writes to the parameters and buffers."""
    nodes = list(module.graph.nodes)
    assignments = [node for node in nodes if _assigns(node)]
    if not assignments:
        return
    place = {node: number for number, node in enumerate(nodes)}
    memory = {node: _memory(node) for node in nodes}
    for node in assignments:
        target, value = (one.meta["example_value"] for one in node.args)
        alike = (target.dtype, target.shape, target.stride()) == (value.dtype, value.shape, value.stride())
        parameter, assigned = node.args
        # Possible views of the former memory, the value and views of it, and inputs of the graph.
        first = {memory[user] for user in parameter.users if place[user] < place[node]}
        before = [one for one in nodes[: place[node]] if one is not parameter and memory[one] is not None]
        views = [one for one in before if memory[one] == memory[assigned] or memory[one] in first]
        read_later = any(place[user] > place[node] for one in views for user in one.users)
        if not alike or read_later or any(one.op == "placeholder" for one in views):
            continue
        with module.graph.inserting_before(node):
            module.graph.call_function(_write, node.args)
        for one in (*node.users, node):
            module.graph.erase_node(one)
    module.recompile()


def _memory(node: fx.Node) -> int | None:
    value = node.meta.get("example_value")
    return memory_of(value) if isinstance(value, torch.Tensor) else None


def _assigns(node: fx.Node) -> bool:
    """Whether the node gives a tensor the memory of another one, and its only user resets the version."""
    users = list(node.users)
    alone = node.target is torch.Tensor.set_ and len(node.args) == 2 and len(users) == 1 and not users[0].users
    return alone and getattr(users[0].target, "__name__", "") == "_lower_version_count_by_1"


def _write(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copy without a new version, as in an assignment."""
    target.data.copy_(value)
