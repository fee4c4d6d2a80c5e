"""Parameters that the forward pass writes into where autograd does not look: under ``torch.no_grad()``, or through ``.data``.

``nn.Embedding(max_norm=...)``, weights that are clipped or normalized at the start of ``forward``. They stay leaves of the
graph, and operators compute their gradients with what was written last. The tracer describes such a write as a result of its
own with a gradient that arrives from outside; there is none, so it is taken out of the graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx
from torch._functorch._aot_autograd import descriptors as d

UNSEEN = "unseen"  # in the ``meta`` of what is written without a new version


def without_gradients_of_writes(module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> None:
    """Take the gradients of what was written into leaves among the flat ``inputs`` out of a joint graph."""
    nodes = list(module.graph.nodes)
    placeholders = {node.meta["desc"]: node for node in nodes if node.op == "placeholder"}
    output = nodes[-1]
    written = {
        desc.mutated_input: value
        for desc, value in zip(output.meta["desc"], output.args[0], strict=True)
        if isinstance(desc, d.InputMutationAOTOutput)
    }
    leaves = {d.PlainAOTInput(place) for place, tensor in enumerate(inputs) if tensor.is_leaf}
    for desc, tangent in placeholders.items():
        if isinstance(desc, d.TangentAOTInput) and isinstance(desc.output, d.InputMutationAOTOutput):
            target = desc.output.mutated_input
            # Eager itself refuses a write that autograd sees.
            if target in leaves and all(user is output or _is_sum(user) for user in tangent.users):
                _take_out(tangent, output)
                written[target].meta[UNSEEN] = True
                module.graph.erase_node(tangent)


def _is_sum(node: fx.Node) -> bool:
    return node.target is torch.ops.aten.add.Tensor and len(node.all_input_nodes) == 2 and not node.kwargs


def _take_out(tangent: fx.Node, output: fx.Node) -> None:
    """Let sums be without it, and what is nothing else be no gradient."""
    for user in list(tangent.users):
        if user is output:
            output.args = ([None if value is tangent else value for value in output.args[0]],)  # type: ignore[union-attr]
        else:
            (other,) = (each for each in user.all_input_nodes if each is not tangent)
            user.replace_all_uses_with(other)
            user.graph.erase_node(user)
