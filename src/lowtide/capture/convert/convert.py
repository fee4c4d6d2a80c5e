"""From a joint graph to a ``Program``.

- Multi-output operators become one op with several values; ``getitem`` and ``detach`` vanish.
- Storages are what fake tensors share; a value whose storage was seen before is a view.
- A gradient that the autograd engine could not take over as it is gets a copy of its own in the program.
- Mutated buffers are written back by ``update`` ops (``convert.updates``).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from lowtide.capture.convert.builder import Builder, owned
from lowtide.capture.convert.gradients import Gradients
from lowtide.capture.convert.nodes import (
    ALIASES,
    ancestors,
    begins_backward,
    fills_empty,
    is_size,
    is_tangent,
    is_whole,
    owned_layout,
)  # fmt: skip
from lowtide.capture.convert.refused import refuse
from lowtide.capture.convert.sparse import chain_of, is_made_sparse, is_sparse
from lowtide.capture.convert.trial import Nature, nature
from lowtide.capture.convert.updates import Updates
from lowtide.capture.trace.classes import unregistered
from lowtide.capture.trace.expected import EXPECT, READ
from lowtide.capture.trace.origins import origin
from lowtide.errors import CaptureError
from lowtide.ir import Phase
from lowtide.ir.graph import EXPECT_TARGET
from lowtide.program import targets
from lowtide.program.distributed.collectives import is_collective, is_wait, waited
from lowtide.program.foreign import is_foreign
from lowtide.program.program import Call, Ref
from lowtide.program.repeating import repeats_bits
from lowtide.program.roles import Gradient, Output

_ATEN = torch.ops.aten
_DROPPED = {"aten._assert_tensor_metadata.default"}


@dataclass
class Converted:
    """The result of ``convert``: the columns of a program, and the roles of the joint graph's inputs and outputs by
    position."""

    builder: Builder
    forward_ops: int
    inputs: tuple[int, ...]
    constants: dict[int, torch.Tensor]
    tangent_outputs: tuple[int, ...]  # for each tangent op, the number of its output
    outputs: dict[Any, int]  # role -> value
    kept: dict[int, int]  # overwritten flat input -> value of its copy
    sums: dict[Any, int]  # role of a gradient -> number of terms in its sum


def convert(module: fx.GraphModule, given: Sequence[torch.Tensor], requires_grad: Sequence[bool]) -> Converted:
    """Walk the joint graph of the flat inputs ``given`` once: forward operators, tangents, backward operators.
    ``requires_grad``: which results have a gradient, whether or not one is expected."""
    return _Walk(module, given, requires_grad).run()


class _Walk:
    def __init__(self, module: fx.GraphModule, given: Sequence[torch.Tensor], requires_grad: Sequence[bool]) -> None:
        self.module, self.given, self.requires_grad = module, given, requires_grad
        self.builder = Builder()
        self.value_of: dict[fx.Node, Any] = {}  # an int, or a dict from position to value for several outputs
        self.constants: dict[int, torch.Tensor] = {}
        self.inputs: list[int] = []
        self.origin: dict[int, tuple[str, str]] = {}  # autograd sequence number -> module path, source
        self.phase = Phase.FORWARD
        self.natures: dict[fx.Node, Nature] = {}  # natures of foreign operators

    def run(self) -> Converted:
        nodes = list(self.module.graph.nodes)
        tangents = self._placeholders(nodes)
        self.natures = {n: nature(n, self.module) for n in nodes if is_foreign(n.target)}
        live = ancestors([nodes[-1], *(n for n in nodes if self._runs_anyway(n))])
        calls = [n for n in nodes if n.op in ("call_function", "get_attr") and n in live and not is_size(n)]
        for node in calls:
            refuse(node, self._origin)
        split = next((i for i, n in enumerate(calls) if begins_backward(n)), len(calls))
        output = nodes[-1]
        roles = dict(zip(output.meta["role"], output.args[0], strict=True))
        needed = ancestors(n for role, n in roles.items() if not isinstance(role, Gradient))
        forward = [n for i, n in enumerate(calls) if i < split or n in needed]
        backward = [n for i, n in enumerate(calls) if i >= split and n not in needed]
        gradients = Gradients(self.builder, nodes, roles, self.value_of)
        self.updates = Updates(self.builder, self.value_of, forward, backward, roles)
        self.updates.begin(frozenset(roles[Output(i)] for i, grad in enumerate(self.requires_grad) if grad))
        for node in forward:
            self._convert(node)
            self.updates.computed(node)
        self.updates.end()
        forward_ops = len(self.builder.ops)
        self.phase = Phase.BACKWARD
        for node in tangents:
            self._tangent(node)
        for node in backward:
            self._convert(node)
            gradients.produced(node)
        gradients.finish()
        self._mark_unused_random(output)
        outputs = {role: self._value(node) for role, node in roles.items() if isinstance(node, fx.Node)}
        outputs.update(gradients.owned)
        tangent_outputs = tuple(node.meta["role"].output for node in tangents)
        inputs = tuple(self.inputs)
        facts = self.constants, tangent_outputs, outputs, self.updates.kept, gradients.sums
        return Converted(self.builder, forward_ops, inputs, *facts)

    def _placeholders(self, nodes: Sequence[fx.Node]) -> list[fx.Node]:
        tangents = []
        for node in nodes:
            if node.op != "placeholder":
                continue
            if is_tangent(node):
                tangents.append(node)
            else:
                tensor = self.given[len(self.inputs)] if is_sparse(node) else node.meta["val"]
                self.value_of[node] = self.builder.add_value(node.name, tensor, None, external=True)
                self.inputs.append(self.value_of[node])
        return tangents

    def _tangent(self, node: fx.Node) -> None:
        value = self.builder.add_value(node.name, node.meta["val"], self.builder.next_op)
        self.builder.metas[value] = owned(self.builder.metas[value])
        self.value_of[node] = value
        self.builder.add_op(node.name, self.phase, Call(targets.tangent, (), {}), (), (value,), effect=True)

    def _convert(self, node: fx.Node) -> None:
        first: Any = node.args[0] if node.args else None
        if node.op == "get_attr":
            self._constant(node)
        elif node.target is operator.getitem:
            container = self.value_of[first]
            self.value_of[node] = container[node.args[1]] if isinstance(container, dict) else container
        elif node.target in ALIASES or is_tangent(node):  # the latter: as ``program.results`` has them arrive
            self.value_of[node] = self.value_of[first]
        elif is_wait(node.target) or is_whole(node) or self.updates.is_copy(node):
            self.value_of[node] = self.value_of[first]
            self.builder.same_storage(node.meta["val"], self._value(first))
        elif node.target is _ATEN.as_strided.default and is_tangent(first):
            # It arrives with these strides (an expanded scalar, say): it needs no more memory than that.
            self.value_of[node] = value = self.value_of[first]
            strides: Any = node.args[2]
            self.builder.metas[value] = owned(replace(self.builder.metas[value], stride=tuple(strides)))
        elif str(node.target) not in _DROPPED and not is_made_sparse(node):
            self._operator(node)

    def _constant(self, node: fx.Node) -> None:
        tensor = operator.attrgetter(str(node.target))(self.module)
        if not isinstance(tensor, torch.Tensor):
            raise CaptureError(f"the program holds {node.target}, a {type(tensor).__name__}, which is not supported")
        if tensor.requires_grad:
            raise unregistered(tensor.shape)
        fake = node.meta.get("val")
        tell = tensor if fake is None or is_sparse(node) else fake
        value = self.builder.add_value(node.name, tell, None, external=True)
        self.value_of[node] = value
        self.constants[value] = tensor

    def _operator(self, node: fx.Node) -> None:
        target, args, kwargs, read = self._call(node)
        tensors = tuple(dict.fromkeys(self._value(n) for n in read))
        op = self.builder.next_op
        result = node.meta.get("val")
        self._note_constant_view(node)
        if isinstance(result, torch.Tensor):
            outputs: tuple[int, ...] = (self.builder.add_value(node.name, result, op),)
            self.value_of[node], positions = outputs[0], None
        else:
            found = [(i, v) for i, v in enumerate(result or ()) if isinstance(v, torch.Tensor)]
            values = {i: self.builder.add_value(f"{node.name}.{i}", v, op) for i, v in found}
            self.value_of[node], outputs, positions = values, tuple(values.values()), tuple(values)
        call, origin, flags = Call(target, args, kwargs, positions), self._origin(node), self._flags(node)
        if node in self.updates.once:
            flags["once"] = True
        name = EXPECT_TARGET if node.target is EXPECT else str(node.target)
        self.builder.add_op(node.name, self.phase, call, tensors, outputs, origin, name, **flags)

    def _note_constant_view(self, node: fx.Node) -> None:
        """Record views of a constant as views of its own memory: fake tensors describe the constant in other memory
        than its views."""
        base: Any = self.value_of.get(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
        if isinstance(base, int) and base in self.constants and getattr(node.target, "is_view", False):
            views = node.meta["val"]
            for each in views if isinstance(views, (list, tuple)) else (views,):
                self.builder.same_storage(each, base)

    def _call(self, node: fx.Node) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], list[fx.Node]]:
        """The function to call, its arguments with references in place of tensors, and the nodes that it reads."""
        chain = chain_of(node)
        if chain is not None:
            return chain[0], tuple(Ref(self._value(each)) for each in chain[1]), {}, chain[1]
        if fills_empty(node):
            return targets.bernoulli, (owned_layout(node.meta["val"]), *node.args[1:]), {}, []
        reference: Any = lambda n: n.meta["val"] if is_size(n) else Ref(self._value(n))  # noqa: E731
        arguments: Any = fx.map_arg((node.args, node.kwargs), reference)
        read = [each for each in node.all_input_nodes if not is_size(each)]
        if node.target is EXPECT:
            return targets.expect, arguments[0], {}, read
        if node.target is READ:
            return targets.read_number, arguments[0], {}, read
        target = waited(node.target) if is_collective(node.target) else _callable(node.target)
        return target, arguments[0], dict(arguments[1]), read

    def _flags(self, node: fx.Node) -> dict[str, bool]:
        flags = _flags(node.target)
        if flags and not repeats_bits(node.target, _device_of(node)):
            flags["once"] = True
        if node in self.natures:
            found = self.natures[node]
            flags["random"], flags["effect"] = found.random and not found.effect, flags["effect"] or bool(found.effect)
        return flags

    def _runs_anyway(self, node: fx.Node) -> bool:
        """Whether a node runs even if nothing reads its result: it advances a generator or has an effect."""
        if str(node.target) in _DROPPED:
            return False
        if node.target is READ:  # operators may take the number that was read
            return True
        flags = self._flags(node)
        return bool(flags) and (flags["random"] or flags["effect"])

    def _origin(self, node: fx.Node) -> tuple[str, str]:
        number = node.meta.get("seq_nr", -1)
        if self.phase is Phase.BACKWARD:
            return self.origin.get(number, ("", ""))
        found = origin(node)
        self.origin.setdefault(number, found)
        return found

    def _value(self, node: fx.Node) -> int:
        value = self.value_of[node]
        if not isinstance(value, int):
            raise CaptureError(f"{node} is used as a whole; only single tensors can be passed on")
        return value

    def _mark_unused_random(self, output: fx.Node) -> None:
        """A random operator whose result is not used still advances the generator, so it runs exactly once."""
        used = {self.value_of[n] for n in output.all_input_nodes if isinstance(self.value_of.get(n), int)}
        for op in reversed(self.builder.ops):
            if op.random and used.isdisjoint(op.outputs):
                self.builder.ops[op.id] = replace(op, effect=True)
            if op.effect or op.random or not used.isdisjoint(op.outputs):
                used.update(op.inputs)


def _callable(target: Any) -> Callable[..., Any]:
    if not callable(target):
        raise CaptureError(f"{target} cannot be called in a captured program")
    return target  # type: ignore[no-any-return]


def _device_of(node: fx.Node) -> torch.device:
    """The device of the node's results."""
    result = node.meta.get("val")
    tensors = result if isinstance(result, (list, tuple)) else (result,)
    return next((each.device for each in tensors if isinstance(each, torch.Tensor)), torch.device("cpu"))


def _flags(target: Any) -> dict[str, bool]:
    """Properties of an operator that its schema declares."""
    if not isinstance(target, torch._ops.OpOverload):
        return {}
    return {
        "random": torch.Tag.nondeterministic_seeded in target.tags,
        "effect": target._schema.is_mutable or not target._schema.returns,
        "collective": is_collective(target),
        "once": is_collective(target),
    }
