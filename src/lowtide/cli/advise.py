"""``lowtide advise train.py ARGS``: watch a few steps of a training script, then stop it.

The answer shows what takes memory (parameters, optimizer states, activations by module) and what each budget from 90 to
30 % of a pass would cost. ``-o advise.html`` writes a page, one per model if several are trained. ``-m MODULE ARGS``
runs a module.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from lowtide.cli.options import positive
from lowtide.cli.run import add_script_options, say, script_of, speaks
from lowtide.errors import LowtideError
from lowtide.progress import progress_bar
from lowtide.report.writers import write_report, writer_of


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=positive, default=3, metavar="N", help="optimizer steps to watch (default: 3)")
    parser.add_argument("-o", "--output", metavar="FILE", help=".html, .txt...: a page per model")
    add_script_options(parser)


def run(options: argparse.Namespace) -> int:
    target, arguments, as_module = script_of(options)
    if options.output:
        writer_of(options.output)  # raises for an unknown extension
    from lowtide.integrations.advice import Watch, advise
    from lowtide.integrations.interpreter import run_script

    watch = Watch(options.steps, say)
    with watch:
        code = run_script(target, arguments, as_module=as_module)
    sys.stdout.flush()
    if not speaks():
        return code
    if not watch.watched:
        outside = [f"{root.name}: {root.outside}" for root in watch.roots.roots]
        none = "this process called no module in training mode (model.train()) with gradients"
        raise LowtideError(f"there is nothing to advise on: {'; '.join(outside) or none}.")
    script = shlex.join([*(["-m"] if as_module else []), target, *arguments])
    for watched in watch.watched:
        with progress_bar(watched.root.name) as on_progress:
            advice = advise(watched, on_progress)
        print(f"\n{advice.text(script)}")
        if options.output:
            path = Path(options.output)
            if len(watch.watched) > 1:
                path = path.with_name(f"{path.stem}.{watched.root.name}{path.suffix}".replace(" ", ""))
            write_report(advice.report, path)
            say(f"report written to {path}")
    return code
