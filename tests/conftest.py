"""Settings that must stand before torch is imported, what the marks ``gpu`` and ``slow`` mean, a heap that is quick to walk,
costs that are quick to measure, plans that are quick to find, generators that are quick to seed."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator

import pytest

from lowtide.solve import minimum
from lowtide.solve.auto import Auto
from tests.support import wide

# Tests are of planners as they are, not of plans made before.
os.environ.setdefault("LOWTIDE_PLAN_CACHE", "0")


def pytest_configure(config: pytest.Config) -> None:
    with contextlib.suppress(ImportError):  # where the tests of a device run alone
        from hypothesis import HealthCheck, settings

        settings.register_profile("busy", suppress_health_check=[HealthCheck.too_slow])  # other programs may be
        settings.load_profile("busy")
    if "not slow" in config.getoption("markexpr"):
        wide.narrow()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return  # most folders below ir and solve do without torch

    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True, scope="module")
def _quick_collections() -> None:
    """Measurements collect garbage, and captures look through all objects: the modules of torch are a million of them, and more
    are loaded as tests need them.

    What exists before the first test of a file is kept out of both. Caches that were made before are not cleared of fake
    tensors then, so a test of that makes its own.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _warm_caches() -> Iterator[None]:
    """Operators are timed without sweeping the processor's caches between repetitions, which would take a fifth of the suite:
    no test depends on how long operators take, and bytes are the same."""
    import numpy as np

    from lowtide.cost import timing

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "_sweep_buffer", lambda: np.zeros(1, dtype=np.int64))
        yield


@pytest.fixture(autouse=True, scope="session")
def _seeds_for_devices_there_are() -> Iterator[None]:
    """``torch.manual_seed`` keeps the seed, with the text of the whole stack, for each kind of device that is not in use yet:
    a millisecond a time, and nobody reads that where there is none."""
    import torch

    with pytest.MonkeyPatch.context() as patch:
        for device, place in ((torch.cuda, torch.cuda.random), (torch.xpu, torch.xpu.random), (torch.mtia, torch.mtia)):
            if not device.is_available():
                patch.setattr(place, "_lazy_call", lambda *_, **__: None, raising=False)
        yield


@pytest.fixture(autouse=True, scope="module")
def brief_searches() -> Iterator[None]:
    """Where no effort is asked for, the first plan that fits is taken, and nothing searches for a better one in the background.
    The runs that make it quicker, and those that look for the least budget, are short ones.

    How well plans are searched for is tested where this is overridden: elsewhere it is their execution that matters, and it
    has to be right for all of them. With the slow tests, all searches are as long as they are by default.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not wide.is_wide():
            patch.setattr(Auto.__init__, "__defaults__", (0, *Auto.__init__.__defaults__[1:]))
            patch.setattr(minimum, "_QUICKER_ROUND", 100)
            patch.setattr(minimum, "_ROUND", 500)
            patch.setattr(minimum, "_answers", {})  # those of long searches are other ones
        yield
