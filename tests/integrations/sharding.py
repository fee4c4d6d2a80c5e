"""Accelerate shards models on accelerators alone; inside ``on_cpus`` it does so on CPUs over gloo too, in its own way."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType


@contextlib.contextmanager
def on_cpus() -> Iterator[None]:
    """Inside, several processes on CPUs count as several devices for a plugin of FSDP."""
    original = AcceleratorState.__init__

    def begun(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        plugin = kwargs.get("fsdp_plugin")
        if plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, plugin
            if self._mixed_precision != "no":
                plugin.set_mixed_precision(self._mixed_precision)
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = begun
    try:
        yield
    finally:
        AcceleratorState.__init__ = original


def forget() -> None:
    """As if no accelerator had been made yet."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
