"""For which results of a traced call a gradient will come back: a guess, or what a backward pass has shown."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from lowtide.objects import structure
from lowtide.program.results import GradientMask, below, below_nodes


def fits(mask: GradientMask, results: Sequence[torch.Tensor]) -> bool:
    """Whether a mask has an entry for each of these results."""
    return len(mask) == len(results) and all(
        entry is False or (tensor.requires_grad and (entry is True or len(entry) == tensor.dim()))
        for entry, tensor in zip(mask, results, strict=True)
    )


def guess_mask(results: Sequence[torch.Tensor], result: structure.Nested, states: Collection[int] = ()) -> GradientMask:
    """Guess for which results a gradient will come back.

    If there are scalars: for those that no other scalar is computed from, and for results that depend on parameters
    which these scalars do not depend on (a scalar may be one term of a loss outside the model). Else: for all results
    that can have a gradient. What the model wrote into its arguments counts only if it returned nothing of the kind,
    and what it left in attributes only if it did neither. ``states``, which it left in buffers with their history,
    count if there is no scalar: the next call continues from them.

    If a backward pass shows that the guess was wrong, another program is made for the gradients that it got.
    """
    returned, _, written = (frozenset(structure.slots(leaf)) for leaf in result.leaves)
    able = [index for index, tensor in enumerate(results) if tensor.requires_grad]
    inner = [index for index in able if index in returned] or [index for index in able if index in written]
    chosen = _outermost([index for index in inner if results[index].numel() == 1], results)
    carried = structure.slots_in_objects(result)
    if chosen:
        known = below([results[index] for index in chosen])
        others = [index for index in inner if index not in carried]
        chosen += [index for index in others if any(map(_is_leaf, below([results[index]], known)))]
    else:
        chosen = [*([index for index in inner if index not in carried] or inner or able), *states]
    return tuple(index in chosen for index in range(len(results)))


def _outermost(chosen: Sequence[int], results: Sequence[torch.Tensor]) -> list[int]:
    """Those from which no other is computed: of a loss that is returned with its terms, the sum."""
    nodes = [results[index].grad_fn for index in chosen]
    within = below_nodes(child for node in nodes if node is not None for child, _ in node.next_functions)
    return [index for index, node in zip(chosen, nodes, strict=True) if node not in within]


def _is_leaf(node: Any) -> bool:
    """Whether an autograd node belongs to a parameter or an input."""
    return not node.next_functions
