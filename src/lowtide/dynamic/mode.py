"""The dispatch mode of the online mode: every operator below autograd goes to the engine; views pass."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.dynamic.operators import Operator
from lowtide.dynamic.patches import uncompiled

_PLAIN = torch.Tensor.__torch_dispatch__


class Depth(threading.local):
    """How many modes of a run the calling thread is in."""

    modes = 0


class OnlineMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """``call(operator, args, kwargs)`` runs an operator. ``detached(tensor)``: by a view, which passes the engine by."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(
        self,
        call: Callable[[Operator, tuple[Any, ...], dict[str, Any]], Any],
        detached: Callable[[torch.Tensor], None],
        depth: Depth,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.call = call
        self.detached = detached
        self.depth = depth
        self.known: dict[Any, Operator] = {}

    def __enter__(self) -> OnlineMode:
        self.depth.modes += 1
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.depth.modes -= 1

    @uncompiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and any(kind.__torch_dispatch__ is not _PLAIN for kind in types):
            return NotImplemented  # a tensor subclass: what it is made of comes by
        operator = self.known.get(func)
        if operator is None:
            operator = self.known[func] = Operator(func)
        if operator.passes:
            if operator.detaches:
                self.detached(args[0])
            return func(*args, **kwargs) if kwargs else func(*args)
        if operator.composite:
            with self:
                return func.decompose(*args, **(kwargs or {}))
        return self.call(operator, args, kwargs or {})
