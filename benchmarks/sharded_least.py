"""The least budgets of sharded training (FSDP2), planned as a whole and block by block: ``python -m benchmarks.sharded_least``.

Each model is sharded in the same processes over gloo, and planned twice at the least budget that is met: by one plan for
the whole model, and by a plan for each block (``lowtide.rematerialize(block, ..., in_flight=blocks)``), where the rest runs as
FSDP2 runs it. Peaks are measured, those of the rank that takes most; losses and gradients of a step are compared to the bit
with FSDP2 alone. A block leaves room for as many like itself as there are blocks. Where blocks differ (T5) plans for each could
do with less. Of the U-Net's 33 none was found: a backward pass ended in an ``InfeasibleBudgetError``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.sharded import Sharded, Sharding, by_ranks
from benchmarks.turns import keep

RESULTS = Path(__file__).parent / "results" / "sharded_least"
_WAYS = {"FSDP2": "FSDP2", "checkpointed": "checkpointed", "blocks": "a plan for each block", "whole": "one plan"}
_PLANNER = "auto{effort=0}"  # meets every budget that longer searches meet
_HEADING = f"| model | ranks | {', MiB | '.join(_WAYS.values())}, MiB | predicted | to the bit |"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sharded_least", description=__doc__)
    parser.add_argument("--models", default="gpt2,llama,t5")
    parser.add_argument("--ranks", default="2")
    parser.add_argument("--output", type=Path, default=RESULTS, help="written as .json and .md")
    parser.add_argument("--train", metavar="MODEL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        return _train(options.train)
    rows = []
    print(_HEADING)
    with tempfile.TemporaryDirectory() as cache:
        for ranks in options.ranks.split(","):
            for model in options.models.split(","):
                rows.append(by_ranks("benchmarks.sharded_least", model, ranks, cache))
                print(_line(rows[-1]), flush=True)
                keep(options.output, rows, _table(rows))
    return 0


def _train(name: str) -> int:
    import torch
    import torch.distributed as dist

    import lowtide

    sharding = Sharding(name)
    ways = {"FSDP2": sharding.sharded(), "checkpointed": sharding.sharded(checkpointed=True)}
    ways |= {"blocks": sharding.sharded(), "whole": sharding.sharded()}
    _plan_blocks(sharding, ways["blocks"])
    model, args, kwargs, _ = ways["whole"]
    _at_least(model, args, kwargs)
    peaks = {way: sharding.peak(trained) for way, trained in ways.items()}
    losses = [sharding.step(trained) for trained in ways.values()]
    gradients = [[p.grad.to_local() for p in trained.model.parameters()] for trained in ways.values()]
    equal = all(torch.equal(losses[0], loss) for loss in losses[1:])
    for other in gradients[1:]:
        equal &= all(torch.equal(one, two) for one, two in zip(gradients[0], other, strict=True))
    if sharding.rank == 0:
        (plan,) = lowtide.plans(model)
        row = {
            "model": name,
            "ranks": dist.get_world_size(),
            "peaks": peaks,
            "predicted": plan.peak_bytes,
            "equal": equal,
        }
        print(json.dumps(row), flush=True)
    dist.destroy_process_group()
    return 0


def _plan_blocks(sharding: Sharding, trained: Sharded) -> None:
    """A plan for each block, at the least budget, as it is called in a step of the model."""
    import torch

    calls = []

    def note(block: Any, args: Any, kwargs: Any) -> None:
        given = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in args]
        calls.append((block, given, kwargs))

    hooks = [block.register_forward_pre_hook(note, with_kwargs=True) for block in trained.blocks]
    sharding.step(trained)
    trained.model.zero_grad(set_to_none=True)
    for hook in hooks:
        hook.remove()
    assert len(calls) == len(trained.blocks) > 0
    for block, args, kwargs in calls:
        _at_least(block, args, kwargs, in_flight=len(calls))


def _at_least(model: Any, args: Any, kwargs: Any, **options: Any) -> None:
    """Rematerialize ``model`` at the least budget that is met."""
    import lowtide

    budget = 1
    try:
        lowtide.rematerialize(model, args, kwargs, budget=budget, planner=_PLANNER, **options)
    except lowtide.InfeasibleBudgetError as error:
        budget = error.minimum_bytes
    lowtide.rematerialize(model, args, kwargs, budget=budget, planner=_PLANNER, **options)


def _line(row: dict[str, Any]) -> str:
    peaks = [f"{row['peaks'][way] / 2**20:.2f}" for way in _WAYS]
    cells = [
        row["model"],
        str(row["ranks"]),
        *peaks,
        f"{row['predicted'] / 2**20:.2f}",
        "yes" if row["equal"] else "NO",
    ]
    return f"| {' | '.join(cells)} |"


def _table(rows: list[dict[str, Any]]) -> str:
    heading = [_HEADING, "|" + "---|" * (_HEADING.count("|") - 1)]
    about = [(__doc__ or "").strip(), "", "`predicted`: of one plan.", ""]
    return "\n".join([*about, *heading, *map(_line, rows)]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
