"""Parameters put together from the shards of all ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lowtide.program.distributed.sharded import _unpacked


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("ranks", [2, 4])
def test_shards_of_any_size(ranks: int, rows: int) -> None:
    """Cut out of what all ranks sent, which holds other parameters too: in memory of its own, one element a rank included."""
    sent = torch.arange(float(ranks * (rows + 3))).view(ranks, rows + 3)
    shard: Any = SimpleNamespace(param_dtype=None, orig_dtype=sent.dtype, fsdp_placement=SimpleNamespace(dim=0))
    for part in (sent[:, :rows], sent[:, 2 : 2 + rows], sent[:, :rows].clone()):
        found = _unpacked(shard, part, ranks)
        assert found.tolist() == part.flatten().tolist()
        assert found.is_contiguous() and found.storage_offset() == 0
        assert found.untyped_storage().nbytes() == part.numel() * 4
        assert found.data_ptr() != part.data_ptr()
