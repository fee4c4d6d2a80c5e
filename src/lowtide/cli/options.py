"""Options that several commands share."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from lowtide.budget import parse_bandwidth, parse_budget
from lowtide.errors import PlanError
from lowtide.ir import Costs, SecondMemory


def add_budget_option(parser: argparse._ActionsContainer) -> None:
    text = 'bytes, "8GiB", "700 MB", or "40%%" of the unconstrained peak'
    parser.add_argument("--budget", help=text)


def add_planner_options(parser: argparse.ArgumentParser, planner: str = "auto") -> None:
    """``planner``: the default planner."""
    parser.add_argument(
        "--planner", default=planner, metavar="SPEC", help=f'see "lowtide planners" (default: {planner})'
    )
    parser.add_argument("--seed", type=seed, default=0, help="seed of the planner (default: 0)")


def add_offload_options(parser: argparse.ArgumentParser, where: str = '"disk", "disk:/folder", "cpu"') -> None:
    """Options to move tensors of a model. ``where``: the help text for where they may go."""
    parser.add_argument("--offload", metavar="WHERE", help=f"let tensors move away and back: {where}")
    parser.add_argument("--offload-budget", metavar="BYTES", help="how much of them may be there at one time")


def add_chunked_loss_option(parser: argparse.ArgumentParser) -> None:
    text = "compute logits and their cross-entropy in pieces; results are no longer equal to the bit"
    parser.add_argument("--chunked-loss", action="store_true", help=text)


def add_second_memory_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = "let tensors move to a second memory at this bandwidth, such as 16GB/s, or at one there and one back: 16GB/s,12GB/s"
    add("--offload", metavar="RATE[,RATE]", help=text)
    add("--offload-budget", metavar="BYTES", help="how much the second memory holds (default: all)")
    add("--offload-latency", type=float, metavar="US", help="microseconds before each transfer (default: 0)")


def with_second_memory(costs: Costs, options: argparse.Namespace) -> Costs:
    """``costs`` with the second memory of the options, instead of its own. Raises ``PlanError``."""
    if options.offload is None:
        if options.offload_budget is not None or options.offload_latency is not None:
            raise PlanError(
                "--offload-budget and --offload-latency need --offload; write for instance --offload 16GB/s."
            )
        return costs
    rates = [parse_bandwidth(text) for text in options.offload.split(",")]
    if len(rates) > 2:
        raise PlanError(f"--offload {options.offload} has {len(rates)} bandwidths; give one, or one each way.")
    if not 0 <= (latency := options.offload_latency or 0) <= 1e9:
        raise PlanError(f"--offload-latency is {latency:g} us, but goes from 0 to 1e9.")
    if (room := options.offload_budget) is not None:
        room = parse_budget(room, None, what="budget of the second memory")
    return replace(costs, second_memory=SecondMemory(rates[0], rates[-1], int(1000 * latency), room))


def seed(text: str) -> int:
    """For ``type=``: an integer of at least 0."""
    return _at_least(0, text)


def positive(text: str) -> int:
    """For ``type=``: an integer of at least 1."""
    return _at_least(1, text)


def _at_least(least: int, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if number < least:
        raise argparse.ArgumentTypeError(f"{number} is below {least}")
    return number


def given(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """The options of these names, as keyword arguments."""
    return {name: getattr(options, name) for name in names}


def add_mesh_options(parser: argparse.ArgumentParser) -> None:
    """``--mesh``, ``--link`` and ``--micro-batches``: a cluster that need not exist; the question is about one rank."""
    parser.add_argument(
        "--mesh", metavar="dp=8,tp=4", help="of a cluster that is not there: what one of its ranks takes"
    )
    parser.add_argument("--link", metavar="NAME|DIM=NAME,..", help="between the ranks of a mesh, such as nvlink")
    parser.add_argument(
        "--micro-batches", type=positive, metavar="M", help="of a mesh with pp=, by 1F1B; the callable takes a stage"
    )


def add_largest_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--largest", metavar="NAME", help="find the largest integer that fits, given to the callable as this argument"
    )
