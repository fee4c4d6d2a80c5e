"""The regions of the mutation run name what there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutation.mutants import mutants_of
from tests.mutation.regions import REGIONS, Region

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("region", REGIONS, ids=lambda region: region.name)
def test_sources_and_tests_are_where_a_region_says(region: Region) -> None:
    sources = region.sources(ROOT)
    assert any(mutants_of(path) for path in sources)
    assert [test for test in region.tests if not (ROOT / test).exists()] == []


def test_a_file_that_moved_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"no file matches ir/nowhere\.py; name where it has gone"):
        Region("moved", ("ir/*.py", "ir/nowhere.py"), ()).sources(ROOT)
