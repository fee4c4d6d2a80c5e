"""``python -m tests.integrations.on_paper RANKS``: what a pass of ``fsdp_program``'s model takes on a rank, on paper."""

from __future__ import annotations

import sys

import torch

import lowtide
from lowtide.demo.gpt2 import build_model
from tests.integrations.fsdp_program import SHAPE
from tests.integrations.launch import say


def main() -> None:
    with torch.device("meta"):
        model = build_model(SHAPE)
        batch = torch.zeros(SHAPE.batch, SHAPE.context, dtype=torch.long)
    sample = {"input_ids": batch, "labels": batch}
    fit = lowtide.fits(model, (), sample, mesh=f"dp={sys.argv[1]}", device="64GiB", planner="keep-all")
    say(f"{fit.pass_bytes}")


if __name__ == "__main__":
    main()
