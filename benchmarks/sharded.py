"""Sharded training (FSDP2) with plans beside checkpointing every block: ``python -m benchmarks.sharded --ranks 2``.

Each model is sharded three times in the same processes over gloo: by ``fully_shard`` alone, with every block checkpointed, and
planned by lowtide within the peak that the second was measured to have. They train by turns; a step's time is the slowest
rank's, and the median of all steps is compared. Losses and gradients are compared to the bit. ``lowest`` is the least budget
that lowtide knows a plan for, as a part of the peak of FSDP2 alone.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.turns import keep

RESULTS = Path(__file__).parent / "results" / "sharded"
_WAYS = ("FSDP2", "checkpointed", "planned")
_HEADING = (
    "| model | ranks | way | peak MiB | predicted MiB | time | predicted time | added time | lowest | to the bit |"
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sharded", description=__doc__)
    parser.add_argument("--models", default="gpt2,llama,t5,unet")
    parser.add_argument("--ranks", default="2")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--output", type=Path, default=RESULTS, help="written as .json and .md")
    parser.add_argument("--train", nargs=2, metavar=("MODEL", "ROUNDS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        return _train(options.train[0], int(options.train[1]))
    rows = []
    print(_HEADING)
    with tempfile.TemporaryDirectory() as cache:
        for ranks in options.ranks.split(","):
            for model in options.models.split(","):
                rows.append(by_ranks("benchmarks.sharded", model, ranks, cache, str(options.rounds)))
                print("\n".join(_lines(rows[-1])), flush=True)
    keep(options.output, rows, _table(rows))
    return 0


class Sharded(NamedTuple):
    """A model, a call of it, and its units below the root."""

    model: Any
    args: Any
    kwargs: Any
    blocks: list[Any]


class Sharding:
    """One rank's part of a model that is compared, with a step of it and the peak of the rank that takes most."""

    def __init__(self, name: str) -> None:
        import torch.distributed as dist

        from benchmarks.compare.models import COMPARED

        dist.init_process_group("gloo")
        self.compared, self.rank = COMPARED[name], dist.get_rank()

    def sharded(self, checkpointed: bool = False) -> Sharded:
        from torch.distributed.fsdp import fully_shard
        from torch.utils.checkpoint import checkpoint

        model, args, kwargs = self.compared.sample()
        blocks = self.compared.blocks(model)  # sharding gives them other classes
        for block in blocks:
            if checkpointed:
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[assignment]
            fully_shard(block)
        return Sharded(fully_shard(model), args, kwargs, blocks)

    def step(self, trained: Sharded) -> Any:
        """The loss, detached."""
        import torch

        torch.manual_seed(self.rank)
        outputs = trained.model(*trained.args, **trained.kwargs)
        loss: torch.Tensor = outputs if isinstance(outputs, torch.Tensor) else outputs.loss
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def peak(self, trained: Sharded, times: int = 3) -> int:
        """The largest of so many steps."""
        import torch
        import torch.distributed as dist

        import lowtide

        found = []
        for _ in range(times):
            found.append(lowtide.measure(self.step, trained).peak_bytes)
            trained.model.zero_grad(set_to_none=True)
        largest = torch.tensor(max(found))
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return int(largest)


def by_ranks(module: str, model: str, ranks: str, cache: str, *more: str) -> dict[str, Any]:
    """The row that ``python -m module --train model`` prints in so many processes."""
    environment = {**os.environ, "LOWTIDE_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
        "-m", module, "--train", model, *more,
    ]  # fmt: skip
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def _train(name: str, rounds: int) -> int:
    import torch
    import torch.distributed as dist

    import lowtide

    sharding = Sharding(name)
    rank, sharded, step, peak = sharding.rank, sharding.sharded, sharding.step, sharding.peak
    ways = {"FSDP2": sharded(), "checkpointed": sharded(checkpointed=True)}
    peaks = {way: peak(trained) for way, trained in ways.items()}
    ways["planned"] = sharded()
    model, args, kwargs, _ = ways["planned"]
    began = time.perf_counter()
    lowtide.rematerialize(model, args, kwargs, budget=peaks["checkpointed"])
    planning_seconds = time.perf_counter() - began
    (plan,) = lowtide.plans(model)
    peaks["planned"] = peak(ways["planned"])
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    equal = True
    for _ in range(rounds):
        losses = []
        for way, trained in ways.items():
            dist.barrier()
            start = time.perf_counter()
            losses.append(step(trained))
            taken = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(taken, op=dist.ReduceOp.MAX)
            seconds[way].append(float(taken))
        gradients = [[p.grad.to_local() for p in trained.model.parameters()] for trained in ways.values()]
        for other in gradients[1:]:
            equal &= all(torch.equal(one, two) for one, two in zip(gradients[0], other, strict=True))
        equal &= all(torch.equal(losses[0], loss) for loss in losses)
        for trained in ways.values():
            trained.model.zero_grad(set_to_none=True)
    try:
        lowtide.rematerialize(sharded().model, args, kwargs, budget=1)
        least = 0
    except lowtide.InfeasibleBudgetError as error:
        least = error.minimum_bytes
    if rank == 0:
        medians = {way: statistics.median(each) for way, each in seconds.items()}
        row = {
            "model": name, "ranks": dist.get_world_size(), "peaks": peaks, "seconds": medians, "equal": equal,
            "predicted_peak": plan.peak_bytes, "predicted_overhead": plan.overhead, "least_bytes": least,
            "planning_seconds": planning_seconds,
        }  # fmt: skip
        print(json.dumps(row), flush=True)
    dist.destroy_process_group()
    return 0


def _lines(row: dict[str, Any]) -> list[str]:
    alone, found = row["seconds"]["FSDP2"], []
    added = {way: row["seconds"][way] - alone for way in _WAYS}
    for way in _WAYS:
        planned = way == "planned"
        cells = [
            row["model"],
            str(row["ranks"]),
            way,
            f"{row['peaks'][way] / 2**20:.1f}",
            f"{row['predicted_peak'] / 2**20:.1f}" if planned else "",
            f"{row['seconds'][way] / alone:.3f}",
            f"{1 + row['predicted_overhead']:.3f}" if planned else "",
            f"{added[way] / added['checkpointed']:.2f}" if planned and added["checkpointed"] > 0 else "",
            f"{row['least_bytes'] / row['peaks']['FSDP2']:.1%}" if planned else "",
            "yes" if row["equal"] else "NO",
        ]
        found.append(f"| {' | '.join(cells)} |")
    return found


def _table(rows: list[dict[str, Any]]) -> str:
    heading = [_HEADING, "|" + "---|" * (_HEADING.count("|") - 1)]
    about = [(__doc__ or "").strip(), "", "`added time`: as a part of what checkpointing adds.", ""]
    return "\n".join([*about, *heading, *(line for row in rows for line in _lines(row))]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
