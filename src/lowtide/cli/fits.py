"""``lowtide fits PACKAGE.MODULE:CALLABLE --device A100-80GB``: can this model be trained on this device?

This needs no such device, and a model built on the meta device takes no memory. The exit code is 3 if it does not fit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from typing import Any

from lowtide.cli.largest import largest_that_fits
from lowtide.cli.options import add_largest_option, add_mesh_options, add_offload_options, add_planner_options, given
from lowtide.cli.target import STAGE, sample
from lowtide.progress import progress_bar

_NO_FIT = 3


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("target", metavar="PACKAGE.MODULE:CALLABLE", help="returns model, args, kwargs")
    add("--device", required=True, help='a name such as "A100-80GB", or its memory: "24GiB"')
    add("--optimizer", default="AdamW", metavar="NAME", help="of torch.optim (default: AdamW)")
    add("--reserve", help="to be left alone (default: 1 GB of a named device)")
    add_mesh_options(parser)
    add_largest_option(parser)
    add_offload_options(parser, '"cpu", the memory of a named device\'s host')
    add("--json", action="store_true", help="print one JSON object")
    add_planner_options(parser, "auto{effort=1}")


def run(options: argparse.Namespace) -> int:
    return answer(options, **given(options, "device", "optimizer", "reserve", "planner"))


def answer(options: argparse.Namespace, **own: Any) -> int:
    """Print whether the model fits; returns the exit code. ``own``: the arguments beside the options that all such
    commands share."""
    import lowtide
    from lowtide.whole_step.mesh import parse_mesh, pretended
    from lowtide.whole_step.pipelined import PipelineFit
    from lowtide.whole_step.stage import stage_of

    asked = given(options, "seed", "offload", "offload_budget", "mesh", "link", "micro_batches")
    sizes = {} if options.mesh is None else parse_mesh(options.mesh)
    stages = range(sizes.get("pp", 0))
    stage_of(sizes, 0 if stages else None, options.micro_batches)
    with contextlib.ExitStack() as stack:
        mesh = stack.enter_context(pretended(sizes)) if sizes else None
        on_progress = stack.enter_context(progress_bar())

        def one(numbers: dict[str, int], stage: dict[str, Any]) -> lowtide.Fit:
            model, args, kwargs = sample(options.target, mesh, **numbers, **stage)
            return lowtide.fits(model, args, kwargs, **asked, **own, **stage, on_progress=on_progress)

        def fit_of(**numbers: int) -> lowtide.Fit | PipelineFit:
            if not stages:
                return one(numbers, {})
            return PipelineFit(tuple(one(numbers, {STAGE: number}) for number in stages))

        if options.largest is None:
            fit, found = fit_of(), None
        else:
            found = largest_that_fits(options.largest, lambda number: fit_of(**{options.largest: number}))
            fit = found.fit
    if options.json:
        print(json.dumps(fit.to_json() | ({} if found is None else {"searched": found.to_json()})))
    else:
        print(fit if found is None else f"{found}\n\n{fit}")
    return 0 if fit else _NO_FIT
