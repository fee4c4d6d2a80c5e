"""Writes of the forward pass into its inputs: when they happen, and which operators read the value from before.

An ``update`` op writes an input. Most of them come at the end of the forward pass, so that a pass that stops halfway
leaves everything as it was. An operator whose result reaches the backward pass must not read an overwritten input
again; it reads a copy of the first value. The same holds for operators that lead to a result with a gradient that is
not expected, if such copies are small. (If that gradient arrives after all, another program continues from what this
one has kept; without copies, it is refused.) Batch normalization in training needs no copy: what it returns for the
backward pass does not depend on the running statistics.

If a forward pass averages all weights and computes with the average (MoCo's momentum encoder), copies would be large.
Such an input is written *at once* (``at_once``), and operators after that read the input itself.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import fx

from lowtide.capture.convert.at_once import at_once, storage_of
from lowtide.capture.convert.builder import Builder, meta_of, owned
from lowtide.capture.convert.nodes import depends_on, is_running_statistic, reaching
from lowtide.capture.trace.writes import UNSEEN
from lowtide.ir import Phase
from lowtide.program import targets
from lowtide.program.program import Call, Ref
from lowtide.program.roles import Input, Written

_ATEN = torch.ops.aten
_SHARE = 32  # copies for unexpected gradients take at most 1/32 of the memory of all inputs


class Updates:
    """The inputs that a program writes, according to ``roles``. ``value_of``: the values of its nodes. ``kept``: for
    each flat input, the value of the copy of its first value. ``once``: operators that must not run a second time."""

    def __init__(
        self,
        builder: Builder,
        value_of: dict[fx.Node, Any],
        forward: Sequence[fx.Node],
        backward: Sequence[fx.Node],
        roles: dict[Any, Any],
    ) -> None:
        self.builder, self.value_of = builder, value_of
        self.kept: dict[int, int] = {}
        self.once: set[fx.Node] = set()
        given = {n.meta["role"].number: n for n in value_of if isinstance(n.meta["role"], Input)}
        self._written = {given[role.input]: n for role, n in roles.items() if isinstance(role, Written)}
        self._targets = {one: value_of[one] for one in self._written}
        self._forward, self._backward = forward, frozenset(backward)
        self._results = [node for node in roles.values() if isinstance(node, fx.Node)]
        self._returned = {storage_of(node) for node in self._results}
        self._at_once: dict[fx.Node, fx.Node] = {}  # computed value -> input that it is written into

    def begin(self, differentiable: Set[fx.Node]) -> None:
        """Before the forward pass, copy inputs for operators that reach the backward pass or one of the
        ``differentiable`` results."""
        expected = reaching(self._forward, self._backward) | self._backward
        changed = {given: new for given, new in self._written.items() if depends_on(given, expected)}
        nodes = [*self.value_of, *self._forward]
        for given, chain in at_once(changed, nodes, self._backward, self._results).items():
            self._at_once[chain.computed] = given
            self.once.update(chain.readers)
        reaches = reaching(self._forward, self._backward, differentiable) | self._backward
        others = [one for one, new in self._written.items() if one not in changed and depends_on(one, reaches)]
        for given in [*(one for one in changed if one not in self._at_once.values()), *self._few(others)]:
            external: int = self.value_of[given]
            name, meta = f"{given.name}_before", owned(self.builder.metas[external])
            copy = self.builder.add_fresh(name, self.builder.next_op, meta, given.meta["val"])
            call = Call(targets.keep_value, (Ref(external),), {})
            self.builder.add_op(name, Phase.FORWARD, call, (external,), (copy,), effect=True)
            self.kept[given.meta["role"].number] = copy
            self.value_of[given] = copy

    def _few(self, some: Sequence[fx.Node]) -> list[fx.Node]:
        """Those of ``some`` inputs whose copies are small compared with all inputs, the smallest first."""
        sizes = {one: self.builder.metas[value].storage_bytes for one, value in self.value_of.items()}
        room, found = sum(sizes.values()) // _SHARE, list[fx.Node]()
        for one in sorted(some, key=lambda one: sizes[one]):
            room -= sizes[one]
            found += [one] if room >= 0 else []
        return found

    def computed(self, node: fx.Node) -> None:
        """If the result of ``node`` is to be written at once, write it, and let later operators read the input
        itself."""
        if (given := self._at_once.get(node)) is not None:
            self.builder.same_storage(node.meta["val"], self._targets[given])
            after = self.builder.add_value(f"{node.name}_written", node.meta["val"], self.builder.next_op)
            self._update(given, self.value_of[node], (after,))
            self.value_of[node] = after

    def end(self) -> None:
        """After the forward pass, write all other inputs."""
        for given, new in self._written.items():
            if given not in self._at_once.values():
                self._update(given, self.value_of[new], ())

    def is_copy(self, node: fx.Node) -> bool:
        """Whether the node copies, without changing the layout, the first value of an input that has a copy already."""
        given: Any = node.args[0] if node.target is _ATEN.clone.default else None
        if (
            given not in self._written
            or given.meta["role"].number not in self.kept
            or storage_of(node) in self._returned
        ):
            return False  # the caller may write into results
        copy: int = self.value_of[given]
        return meta_of(node.meta["val"]) == self.builder.metas[copy]

    def _update(self, given: fx.Node, value: int, outputs: tuple[int, ...]) -> None:
        target, new = self._targets[given], self._written[given]
        unseen = {"unseen": True} if UNSEEN in new.meta or is_running_statistic(new) else {}
        call = Call(targets.update, (Ref(target), Ref(value)), unseen, None if outputs else ())
        self.builder.add_op(f"update_{new.name}", Phase.FORWARD, call, (target, value), outputs, effect=True)
