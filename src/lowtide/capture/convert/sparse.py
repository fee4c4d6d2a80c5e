"""Sparse tensors in COO layout (``torch.sparse.mm(adjacency, x)`` in graph networks), which a plan does not hold.

Sparse tensors that the model is given or holds are inputs. Sparse tensors computed from them (the transposed adjacency
that a backward pass reads) are computed again inside each operator that reads them. Fake ones have no entries, so only
operators that do not ask for the number of entries are traced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lowtide.program.program import Call, Ref
from lowtide.program.references import map_references

_KNOWN = {
    "aten._coalesce.default", "aten._sparse_addmm.default", "aten._sparse_coo_tensor_with_dims_and_tensors.default",
    "aten._sparse_sum.default", "aten._sparse_sum.dim", "aten._sparse_sum.dim_dtype", "aten._sparse_sum.dtype",
    "aten._to_copy.default", "aten._to_dense.default", "aten.addmm.default", "aten.clone.default", "aten.detach.default",
    "aten.div.Scalar", "aten.div.Tensor", "aten.mm.default", "aten.mul.Scalar", "aten.mul.Tensor", "aten.neg.default",
    "aten.sum.default", "aten.t.default", "aten.transpose.int",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class SparseChain:
    """Consecutive calls as one function of what they read, which returns the last result. A ``Ref`` is the number of an
    argument or, beyond the arguments, of an earlier result."""

    calls: tuple[Call, ...]

    def __call__(self, *given: torch.Tensor) -> Any:
        values: list[Any] = list(given)
        for call in self.calls:
            args, kwargs = map_references((call.args, call.kwargs), lambda ref: values[ref.value])
            values.append(call.target(*args, **kwargs))
        return values[-1]


def is_sparse(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.layout is torch.sparse_coo


def is_made_sparse(node: fx.Node) -> bool:
    """Whether the node becomes a part of each operator that reads it."""
    return node.op == "call_function" and is_sparse(node)


def is_known(node: fx.Node) -> bool:
    """Whether a node can be traced as far as sparse tensors are concerned: it is a known operator, or has only dense
    tensors."""
    return not (is_made_sparse(node) or any(map(is_sparse, node.all_input_nodes))) or str(node.target) in _KNOWN


def chain_of(node: fx.Node) -> tuple[SparseChain, list[fx.Node]] | None:
    """For a node that reads computed sparse tensors: one function of all, and what it reads. ``None`` for other
    nodes."""
    if not any(map(is_made_sparse, node.all_input_nodes)):
        return None
    made: list[fx.Node] = []
    given: list[fx.Node] = []

    def visit(one: fx.Node) -> None:
        for each in one.all_input_nodes:
            if not is_made_sparse(each):
                given.extend([] if each in given else [each])
            elif each not in made:
                visit(each)
        made.append(one)

    visit(node)
    number = {each: place for place, each in enumerate((*given, *made))}

    def call(one: fx.Node) -> Call:
        reference: Any = lambda each: Ref(number[each])  # noqa: E731
        arguments: Any = fx.map_arg((one.args, one.kwargs), reference)
        return Call(one.target, *arguments)  # type: ignore[arg-type]

    return SparseChain(tuple(map(call, made))), given
