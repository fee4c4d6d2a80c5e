"""The columns of a program while they grow: ops, calls, values, layouts and storages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lowtide.ir import Op, Phase, Storage, Value
from lowtide.program.layouts import dense_parts, span_elements
from lowtide.program.program import Call, TensorMeta


@dataclass
class Builder:
    """Grows the columns of a program op by op."""

    calls: list[Call] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    metas: list[TensorMeta] = field(default_factory=list)
    bases: list[int | None] = field(default_factory=list)  # per storage
    _storages: dict[int, int] = field(default_factory=dict)
    _keep_alive: list[Any] = field(default_factory=list)

    def add_value(self, name: str, fake: torch.Tensor, producer: int | None, external: bool = False) -> int:
        if fake.layout is torch.sparse_coo:
            self.bases.append(None)
            return self._append(name, len(self.bases) - 1, producer, sparse_meta(fake))
        storage = fake.untyped_storage()
        self._keep_alive.append(storage)
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = len(self.bases)
            self.bases.append(None if external else producer)
        return self._append(name, self._storages[storage._cdata], producer, meta_of(fake))

    def add_fresh(self, name: str, producer: int, meta: TensorMeta, instead_of: torch.Tensor | None = None) -> int:
        """Add a value in a new storage of its own. Later views of ``instead_of`` belong to that storage."""
        if instead_of is not None:
            self._storages[instead_of.untyped_storage()._cdata] = len(self.bases)
        self.bases.append(producer)
        return self._append(name, len(self.bases) - 1, producer, meta)

    def same_storage(self, fake: torch.Tensor, value: int) -> None:
        """Make views of ``fake`` views of the value."""
        storage = fake.untyped_storage()
        self._keep_alive.append(storage)
        self._storages[storage._cdata] = self.values[value].storage

    def _append(self, name: str, storage: int, producer: int | None, meta: TensorMeta) -> int:
        dtype = str(meta.dtype).removeprefix("torch.")
        self.values.append(Value(len(self.values), name, storage, producer, dtype, meta.shape))
        self.metas.append(meta)
        return len(self.values) - 1

    @property
    def next_op(self) -> int:
        """The id of the next op. Its values are added before it."""
        return len(self.ops)

    def add_op(
        self,
        name: str,
        phase: Phase,
        call: Call,
        inputs: Iterable[int],
        outputs: Iterable[int],
        origin: tuple[str, str] = ("", ""),
        target: str = "",
        **flags: Any,
    ) -> None:
        """Add an op. ``origin``: module path and source. ``target``: the operator's name, if it is not one of our
        own."""
        module, source = origin
        target = target or f"lowtide.{call.target.__name__}"
        op = Op(self.next_op, name, target, tuple(inputs), tuple(outputs), phase, module=module, source=source, **flags)
        self.ops.append(op)
        self.calls.append(call)

    def storages(self) -> tuple[Storage, ...]:
        members: list[list[int]] = [[] for _ in self.bases]
        for value in self.values:
            members[value.storage].append(value.id)
        return tuple(Storage(i, base, tuple(members[i])) for i, base in enumerate(self.bases))


def meta_of(tensor: torch.Tensor) -> TensorMeta:
    return TensorMeta(
        tuple(tensor.shape),
        tuple(tensor.stride()),
        tensor.dtype,
        tensor.device,
        tensor.storage_offset(),  # type: ignore[arg-type]  # or a symbolic size
        tensor.untyped_storage().nbytes(),
    )


def sparse_meta(tensor: torch.Tensor) -> TensorMeta:
    """The layout of a sparse tensor, which is held whole and never freed."""
    nbytes = sum(part.nbytes for part in dense_parts(tensor))
    entries = tensor._nnz(), tensor.is_coalesced()
    return TensorMeta(tuple(tensor.shape), (), tensor.dtype, tensor.device, 0, nbytes, entries)


def owned(meta: TensorMeta) -> TensorMeta:
    """The same layout in a storage that holds only this tensor."""
    return replace(meta, storage_offset=0, storage_bytes=span_elements(meta.shape, meta.stride) * meta.dtype.itemsize)
