"""References inside of arguments."""

from __future__ import annotations

import torch

from lowtide.program import Ref
from lowtide.program.references import map_references


def test_references_are_replaced_at_any_depth() -> None:
    size = torch.Size([2, 3])
    arguments = ([Ref(0), (Ref(1), 2.5)], {"out": Ref(2), "sizes": size}, None)
    found = map_references(arguments, lambda ref: f"v{ref.value}")
    assert found == (["v0", ("v1", 2.5)], {"out": "v2", "sizes": size}, None)
    assert found[1]["sizes"] is size
