"""Make every gradient one that the autograd engine takes over as it is.

The engine's ``AccumulateGrad`` keeps the tensor it is given if it has the parameter's layout and nobody else holds it,
and copies it otherwise. A copy made by the engine would escape the plan, so the program makes it, right after the
gradient is final.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd import descriptors as d

from lowtide.capture.convert.builder import Builder, owned
from lowtide.ir import Phase
from lowtide.program import layouts, targets
from lowtide.program.program import Call, Ref, TensorMeta


class Gradients:
    """Follows the conversion of the backward pass; ``owned`` maps each gradient's descriptor to its final value."""

    def __init__(
        self, builder: Builder, nodes: Sequence[fx.Node], descriptors: dict[Any, Any], value_of: dict[fx.Node, Any]
    ) -> None:
        self.builder = builder
        self.value_of = value_of
        self.owned: dict[Any, int] = {}
        self._taken: set[int] = set()
        self._inputs = {n.meta["desc"]: n for n in nodes if n.op == "placeholder"}
        self._pending: dict[fx.Node, list[Any]] = {}
        for descriptor, node in descriptors.items():
            if isinstance(descriptor, d.GradAOTOutput) and isinstance(node, fx.Node):
                self._pending.setdefault(node, []).append(descriptor)
        self._last_use = _last_uses(nodes)
        self._position = {node: index for index, node in enumerate(nodes)}

    def produced(self, node: fx.Node) -> None:
        """``node`` was just converted: if it is a gradient, own it now."""
        for descriptor in self._pending.pop(node, ()):
            self._own(node, descriptor)

    def finish(self) -> None:
        """Gradients that no backward operator produces (a tangent itself, say)."""
        for node in list(self._pending):
            self.produced(node)

    def _own(self, node: fx.Node, descriptor: Any) -> None:
        builder, value = self.builder, self.value_of[node]
        meta, storage = builder.metas[value], builder.values[value].storage
        parameter = builder.metas[self.value_of[self._inputs[descriptor.grad_of]]]
        base = builder.bases[storage]
        ours = base is not None and builder.ops[base].phase is Phase.BACKWARD and not builder.ops[base].effect
        whole = meta.storage_bytes == owned(meta).storage_bytes
        final = self._last_use.get(_storage_key(node), -1) <= self._position[node]
        if ours and whole and final and storage not in self._taken and _obeys_contract(meta, parameter):
            self._taken.add(storage)
        else:
            value = _copy(builder, value, parameter)
        self.owned[descriptor] = value


def _storage_key(node: fx.Node) -> int:
    value = node.meta.get("val")
    return int(value.untyped_storage()._cdata) if isinstance(value, torch.Tensor) else -1


def _last_uses(nodes: Sequence[fx.Node]) -> dict[int, int]:
    """Per storage, the position of the last operator that reads it other than to form a view of it."""
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
