"""Small programs written by hand: ``program_of(("y", target, ("x", 2)), x=torch.empty(3))``."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from lowtide.ir import Graph, Op, Phase, Storage, Value
from lowtide.program.program import Call, Program, Ref, TensorMeta


def program_of(*calls: tuple[Any, ...], **inputs: torch.Tensor) -> Program:
    """A forward program. A call is (name or names, target, args[, kwargs[, result]]).

    A string among the arguments is the value of that name. Layouts come from running the target, unless ``result`` says
    what the capture is to believe; inputs give layouts only.
    """
    builder = _Builder()
    for name, tensor in inputs.items():
        builder.value(name, tensor, None)
    for call in calls:
        builder.call(*call)
    return builder.program(len(inputs))


class _Builder:
    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.ids: dict[str, int] = {}
        self.values: list[Value] = []
        self.metas: list[TensorMeta] = []
        self.ops: list[Op] = []
        self.calls: list[Call] = []
        self.storages: dict[int, tuple[int, int | None, list[int]]] = {}

    def value(self, name: str, tensor: torch.Tensor, producer: int | None) -> int:
        value = self.ids[name] = len(self.values)
        self.tensors[name] = tensor
        storage = self.storages.setdefault(tensor.untyped_storage()._cdata, (len(self.storages), producer, []))
        storage[2].append(value)
        self.values.append(Value(value, name, storage[0], producer, str(tensor.dtype), tuple(tensor.shape)))
        self.metas.append(
            TensorMeta(
                tuple(tensor.shape),
                tuple(tensor.stride()),
                tensor.dtype,
                tensor.device,
                int(tensor.storage_offset()),
                tensor.untyped_storage().nbytes(),
            )
        )
        return value

    def call(self, names: Any, target: Any, args: Any, kwargs: Any = None, result: Any = None) -> None:
        names_of = (names,) if isinstance(names, str) else names
        if result is None:
            with torch.random.fork_rng(devices=[]):
                result = target(*self._map(args, self.tensors), **self._map(kwargs or {}, self.tensors))
        outputs = (result,) if isinstance(names, str) else result
        op = len(self.ops)
        inputs = tuple(self.ids[arg] for arg in args if isinstance(arg, str) and arg in self.ids)
        refs = {name: Ref(value) for name, value in self.ids.items()}
        values = tuple(self.value(name, tensor, op) for name, tensor in zip(names_of, outputs, strict=True))
        positions = None if isinstance(names, str) else tuple(range(len(names_of)))
        self.ops.append(Op(op, f"op{op}", str(target), inputs, values, Phase.FORWARD))
        self.calls.append(Call(target, self._map(tuple(args), refs), self._map(kwargs or {}, refs), positions))

    def _map(self, argument: Any, names: dict[str, Any]) -> Any:
        if isinstance(argument, str):
            return names.get(argument, argument)
        if isinstance(argument, (list, tuple)):
            return type(argument)([self._map(item, names) for item in argument])
        if isinstance(argument, dict):
            return {key: self._map(item, names) for key, item in argument.items()}
        return argument

    def program(self, inputs: int) -> Program:
        graph = Graph(
            name="by hand",
            ops=tuple(self.ops),
            values=tuple(self.values),
            storages=tuple(Storage(i, base, tuple(values)) for i, base, values in self.storages.values()),
            inputs=tuple(range(inputs)),
            forward_outputs=(),
            outputs=(len(self.values) - 1,),
            forward_ops=len(self.ops),
        )
        given = {"graph": graph, "calls": tuple(self.calls), "metas": tuple(self.metas)}
        rest = {field.name: None for field in dataclasses.fields(Program) if field.name not in given}
        return Program(**given, **rest)  # type: ignore[arg-type]
