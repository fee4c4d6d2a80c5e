"""Make every gradient one that the autograd engine takes over without a copy.

The engine's ``AccumulateGrad`` keeps the tensor that it is given if it has the parameter's layout and nobody else holds
it; otherwise it copies it. A copy made by the engine would escape the plan, so the program makes it, right after the
gradient is final.

If others may add to the same gradient (that of a tensor read elsewhere in a larger model, or of a computed argument),
the engine adds the terms one after the other, and the order decides the last bit. So after ``split_sums`` such
gradients leave the program as separate terms, each in its own layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from lowtide.capture.convert.builder import Builder, owned
from lowtide.capture.convert.nodes import is_backward
from lowtide.capture.trace.packed import refuse_later_terms
from lowtide.ir import Phase
from lowtide.program import layouts, targets
from lowtide.program.program import Call, Ref, TensorMeta
from lowtide.program.roles import Gradient, Term

_ADD = torch.ops.aten.add.Tensor


def split_sums(module: fx.GraphModule, first: int = 0) -> None:
    """Replace the gradients of flat inputs, from the ``first`` on, by their terms in the output of the joint graph."""
    if first == 0:
        refuse_later_terms(module, others_add=True)
    output = next(iter(reversed(module.graph.nodes)))
    outputs: list[Any] = []
    roles: list[Any] = []
    for node, role in zip(output.args[0], output.meta["role"], strict=True):
        if isinstance(node, fx.Node) and isinstance(role, Gradient) and role.input >= first:
            terms = _terms(node, role.arrived)
            outputs += terms
            roles += [Term(role.input, number, len(terms)) for number in range(len(terms))]
        else:
            outputs.append(node)
            roles.append(role)
    output.args = (type(output.args[0])(outputs),)
    output.meta["role"] = roles


def _terms(node: fx.Node, arrived: int) -> list[fx.Node]:
    """The terms, in order, of a sum that the engine made of so many terms and that nothing else reads. A sum among its
    terms was made for another tensor, of which this one is a copy, say."""
    found: list[fx.Node] = []
    while len(found) + 1 < arrived and node.target is _ADD and len(node.users) == 1 and not node.kwargs:
        first, second = node.args
        if not (is_backward(node) and isinstance(first, fx.Node) and isinstance(second, fx.Node)):
            break
        if not first.meta["val"].shape == second.meta["val"].shape == node.meta["val"].shape:
            break
        found.append(second)
        node = first
    return [node, *reversed(found)]


class Gradients:
    """Follows the conversion of the backward pass. ``owned``: role of each gradient -> final value. ``sums``: role of
    each gradient of something used several times -> number of terms."""

    def __init__(
        self, builder: Builder, nodes: Sequence[fx.Node], roles: dict[Any, Any], value_of: dict[fx.Node, Any]
    ) -> None:
        self.builder = builder
        self.value_of = value_of
        self.owned: dict[Any, int] = {}
        self.sums: dict[Any, int] = {}
        self._taken: set[int] = set()
        self._inputs = [n for n in nodes if n.op == "placeholder"]
        self._pending: dict[fx.Node, list[Any]] = {}
        for role, node in roles.items():
            if isinstance(role, Gradient) and isinstance(node, fx.Node):
                self._pending.setdefault(node, []).append(role)
        self._last_use = _last_uses(nodes)
        self._position = {node: index for index, node in enumerate(nodes)}

    def produced(self, node: fx.Node) -> None:
        """Called after ``node`` was converted. If it is a gradient, make it own its memory."""
        for role in self._pending.pop(node, ()):
            self._own(node, role)
            count = 1 if isinstance(role, Term) else len(_terms(node, role.arrived))
            if count > 1:
                self.sums[role] = count

    def finish(self) -> None:
        """Handle gradients that no backward operator produces (a tangent itself, say)."""
        for node in list(self._pending):
            self.produced(node)

    def _own(self, node: fx.Node, role: Any) -> None:
        builder, value = self.builder, self.value_of[node]
        meta, storage = builder.metas[value], builder.values[value].storage
        parameter = builder.metas[self.value_of[self._inputs[role.input]]]
        if meta.shape != parameter.shape:  # a distributed tensor in other placements
            parameter = replace(parameter, shape=meta.shape, stride=meta.stride)
        base = builder.bases[storage]
        ours = base is not None and builder.ops[base].phase is Phase.BACKWARD and not builder.ops[base].effect
        whole = meta.storage_bytes == owned(meta).storage_bytes
        final = self._last_use.get(_storage_key(node), -1) <= self._position[node]
        taken_over = ours and whole and final and _obeys_contract(meta, parameter)
        if isinstance(role, Term):
            parameter = replace(parameter, stride=meta.stride)
            # The engine adds further terms to this tensor in place.
            first = role.number == 0 and role.count > 1
            taken_over = (ours and whole and final) if first else base is not None
            taken_over = taken_over and meta.shape == parameter.shape
        if taken_over and storage not in self._taken:
            self._taken.add(storage)
        else:
            value = _copy(builder, value, parameter)
        self.owned[role] = value


def _storage_key(node: fx.Node) -> int:
    value = node.meta.get("val")
    return layouts.memory_of(value) if isinstance(value, torch.Tensor) else -1


def _last_uses(nodes: Sequence[fx.Node]) -> dict[int, int]:
    """Per storage, the position of the last operator that reads it, other than to make a view."""
    last: dict[int, int] = {}
    for position, node in enumerate(nodes):
        if node.op == "call_function":
            own = _storage_key(node)
            for used in node.all_input_nodes:
                if _storage_key(used) != own:
                    last[_storage_key(used)] = position
    return last


def _copy(builder: Builder, value: int, parameter: TensorMeta) -> int:
    meta = builder.metas[value]
    stride = _expected_stride(parameter)
    producer = builder.values[value].producer
    name = f"own_{builder.values[value].name}"
    fresh = builder.add_fresh(name, builder.next_op, owned(replace(meta, shape=parameter.shape, stride=stride)))
    call = Call(targets.own_layout, (Ref(value), parameter.shape, stride), {})
    origin = ("", "") if producer is None else (builder.ops[producer].module, builder.ops[producer].source)
    builder.add_op(name, Phase.BACKWARD, call, (value,), (fresh,), origin)
    return fresh


def _obeys_contract(gradient: TensorMeta, parameter: TensorMeta) -> bool:
    same_shape = gradient.shape == parameter.shape
    return same_shape and layouts.is_equivalent(parameter.shape, gradient.stride, _expected_stride(parameter))


def _expected_stride(parameter: TensorMeta) -> tuple[int, ...]:
    dense = layouts.is_dense(parameter.shape, parameter.stride)
    return parameter.stride if dense else layouts.contiguous_strides(parameter.shape)
