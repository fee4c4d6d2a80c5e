"""``lowtide planners``: the values for ``--planner``."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from lowtide.solve import get_planner, planner_names, planner_summary


def run(options: argparse.Namespace) -> int:
    width = max(map(len, planner_names()))
    for name in planner_names():
        print(f"{name:<{width}}  {planner_summary(name)}")
        planner: Any = get_planner(name)
        for field in dataclasses.fields(planner):
            print(f"{'':<{width}}    {field.name.replace('_', '-')}={str(field.default).lower()}")
    return 0
