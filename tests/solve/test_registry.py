"""Planner specs."""

from __future__ import annotations

import pytest

from lowtide.errors import PlanError
from lowtide.solve import format_spec, get_planner, planner_names, planner_summary


def test_every_planner_round_trips_and_has_a_summary() -> None:
    assert set(planner_names()) >= {"auto", "greedy", "keep-all"}
    for name in planner_names():
        assert format_spec(get_planner(name)) == name
        assert planner_summary(name)


@pytest.mark.parametrize("spec", ["auto{effort=2}", "auto{effort=1,exact=false}", "greedy{limits=3}"])
def test_options_round_trip(spec: str) -> None:
    planner = get_planner(spec)
    assert format_spec(planner) == spec
    assert get_planner(format_spec(planner)) == planner


def test_spaces_and_defaults_are_normalised() -> None:
    assert format_spec(get_planner(" auto{ effort = 3 } ")) == "auto"


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ("checkmait", "keep-all"),
        ("auto(effort=2)", "written in braces"),
        ("auto{speed=2}", "effort"),
        ("auto{effort=two}", "int"),
        ("auto{exact=maybe}", "true or false"),
        ("auto{effort=9}", "0 to 5"),
        ("auto{effort=2", "brace"),
        ("keep-all{effort=2}", "none"),
    ],
)
def test_bad_specs_say_what_is_known(spec: str, names: str) -> None:
    with pytest.raises(PlanError, match=names):
        get_planner(spec)
