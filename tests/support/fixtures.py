"""Fixtures of several folders of tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from lowtide import pipeline
from lowtide.cost import analytical_costs
from lowtide.ir import Costs
from lowtide.program import Program


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cost cache of the session's own: nothing is written elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path_factory.mktemp("costs")))
        yield


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The same sums in the same order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def without_clock(patch: pytest.MonkeyPatch, costs: Callable[[Program], Costs] = analytical_costs) -> None:
    """Plans are made by these ``costs``, whatever else the machine does."""
    patch.setattr(pipeline, "measure_costs", lambda program, **_: costs(program))
