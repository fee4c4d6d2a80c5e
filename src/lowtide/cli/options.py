"""Options that several commands share."""

from __future__ import annotations

import argparse


def add_budget_option(parser: argparse._ActionsContainer) -> None:
    text = 'bytes, "8GiB", "700 MB", or "40%%" of the unconstrained peak'
    parser.add_argument("--budget", help=text)


def add_planner_options(parser: argparse.ArgumentParser, planner: str = "auto") -> None:
    """``planner``: the default."""
    parser.add_argument(
        "--planner", default=planner, metavar="SPEC", help=f'see "lowtide planners" (default: {planner})'
    )
    parser.add_argument("--seed", type=seed, default=0, help="seed of the planner (default: 0)")


def positive(text: str) -> int:
    """For ``type=``: a whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is below 1")
    return number


def seed(text: str) -> int:
    """For ``type=``: a whole number of at least 0."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{number} is below 0")
    return number
