"""What the user's code does in a backward pass: code of autograd functions, and hooks on tensors.

It runs once, while the call is traced, and not in planned backward passes. What it computes with tensors is in the
program. Anything else that it does would not happen again, so there must not be anything else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass

from torch import nn

from lowtide.capture.python_state.effects import attribute_effects, random_numbers
from lowtide.capture.python_state.effects.snapshots import snapshot
from lowtide.capture.python_state.guards.reach import Reach
from lowtide.capture.python_state.paths import named, texts
from lowtide.errors import CaptureError


@dataclass(eq=False, repr=False)
class BackwardEffectError(CaptureError):
    """Raised if a backward pass has changed something. ``changed``: the names of what it changed."""

    _: KW_ONLY
    changed: frozenset[str]


@contextlib.contextmanager
def none_of(model: nn.Module, reached: Reach) -> Iterator[None]:
    """A context for a backward pass. Raises ``BackwardEffectError`` if the pass draws from Python's or NumPy's
    generators, or changes attributes of the model, an argument, or anything that its code can name (``reached``).
    Another thread may have done so meanwhile; then it may not happen again. ``model``: the traced model, whose
    attributes are left as they are."""
    before, reach, start = snapshot(model), reached.as_now(), random_numbers.state()
    with random_numbers.noted() as drawn:
        yield
    changes = attribute_effects.changes(model, before)
    changed = reach.changed()
    if changes:
        changed.append(texts([*changes.tensors, *changes.plain]))
    reach.put_back()
    if drawn:
        random_numbers.set_state(start)
        changed.append(f"the state of a random generator ({drawn[0]})")
    if changed:
        raise BackwardEffectError(
            f"code that runs in the backward pass (of an autograd function, or a hook) changes {named(changed)}, which planned "
            "calls would not. Do that outside of the passes, or run the model under lowtide.online.",
            changed=frozenset(changed),
        )
