"""What a program of several processes does: the scenarios that its arguments name, one after the other, on every rank.

After each a recorder tells whether all ranks have run the same collectives in the same order.
"""

from __future__ import annotations

import datetime
import gc
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.integrations.collectives import assert_one_order, noted, record
from tests.integrations.launch import say


def perform(*scenarios: Callable[[], None]) -> None:
    """Those of ``scenarios`` whose names the command line gives."""
    known = {scenario.__name__: scenario for scenario in scenarios}
    torch.set_num_threads(1)
    gc.freeze()  # measurements collect garbage: the modules that are loaded are none
    record()
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=8))
    for name in sys.argv[1:]:
        before = len(noted())
        known[name]()
        count = assert_one_order(before)
        dist.monitored_barrier()  # no other leaves tensors to a thread of gloo that lets go of them when Python has ended
        say(f"rank {dist.get_rank()}: {name} passed, {count} collectives in one order")
    dist.destroy_process_group()


def local(tensor: Any) -> torch.Tensor:
    """The rank's own part of it, where it is distributed."""
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found
