"""``lowtide max-batch PACKAGE.MODULE:CALLABLE``: the largest batch that can be trained inside a memory budget."""

from __future__ import annotations

import argparse
from typing import Any

from lowtide.cli.options import add_offload_options, given
from lowtide.cli.target import call
from lowtide.errors import PlanError
from lowtide.progress import progress_bar

_EXAMPLE = "build() returns (model, make_sample), and make_sample(batch) returns (args, kwargs)"


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("target", metavar="PACKAGE.MODULE:CALLABLE", help="returns model, make_sample")
    amount = parser.add_mutually_exclusive_group(required=True)
    amount.add_argument("--total-budget", help='of everything, for instance "8GiB"')
    amount.add_argument("--budget", help="of a forward and backward pass alone")
    add("--max-overhead", type=float, metavar="PERCENT", help="most extra time per step (default: any)")
    add("--planner", default="auto{effort=1}", metavar="SPEC", help="default: auto{effort=1}")
    add_offload_options(parser)
    add("--limit", type=int, default=1 << 16, help="largest batch to try (default: 65536)")


def run(options: argparse.Namespace) -> int:
    model, make_sample = _built(options.target)
    import lowtide

    asked = given(options, "total_budget", "budget", "planner", "limit", "offload", "offload_budget")
    overhead = None if options.max_overhead is None else options.max_overhead / 100
    with progress_bar() as on_progress:
        print(lowtide.max_batch(make_sample, model, **asked, max_overhead=overhead, on_progress=on_progress))
    return 0


def _built(target: str) -> tuple[Any, Any]:
    """The user's model and function. Raises ``PlanError`` for anything else."""
    from torch import nn

    result = call(target)
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], nn.Module):
        raise PlanError(f"{target} returned {type(result).__name__}, not a tuple (model, make_sample); {_EXAMPLE}.")
    return result
