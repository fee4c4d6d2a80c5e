"""``parameter.data = value`` in Dynamo's graphs.

Dynamo has it as ``set_``, which gives the parameter the memory of the value, and a version that is taken back. Where the value
lies alike and is read by nothing else, the parameter keeps its memory and takes over the numbers: no one sees a difference.
"""

from __future__ import annotations

import torch
from torch import fx

from lowtide.program.layouts import memory_of


def write_assigned_data(module: fx.GraphModule) -> None:
    """Have the graph write into parameters and buffers what it assigns to their ``.data``."""
    given = {node: memory_of(node.meta["example_value"]) for node in module.graph.nodes if _is_given(node)}
    for node in list(module.graph.nodes):
        users = list(node.users)
        if (
            node.target is not torch.Tensor.set_
            or len(node.args) != 2
            or len(users) != 1
            or not _lowers_version(users[0])
        ):
            continue
        target, value = (one.meta["example_value"] for one in node.args)
        alike = (target.dtype, target.shape, target.stride()) == (value.dtype, value.shape, value.stride())
        others = [memory for one, memory in given.items() if one is not node.args[0]]
        if not alike or memory_of(value) in others or len(node.args[1].users) > 1:
            continue
        with module.graph.inserting_before(node):
            module.graph.call_function(_write, node.args)
        module.graph.erase_node(users[0])
        module.graph.erase_node(node)
    module.recompile()


def _is_given(node: fx.Node) -> bool:
    return node.op == "placeholder" and isinstance(node.meta.get("example_value"), torch.Tensor)


def _lowers_version(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "_lower_version_count_by_1" and not node.users


def _write(target: torch.Tensor, value: torch.Tensor) -> None:
    """Without a new version, as an assignment has none."""
    target.data.copy_(value)
