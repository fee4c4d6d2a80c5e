"""What is made of planned modules (copies, files, scripts), as it is made of them without this package."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

from torch import nn

from lowtide.api import runtime_of


@contextlib.contextmanager
def made_of_without_plans() -> Iterator[None]:
    """Inside, modules are saved, copied, and compiled by ``torch.jit.script`` as if they had no plans."""
    own: Any = nn.Module
    own.__reduce_ex__, own.__prepare_scriptable__ = _reduce, _to_script
    try:
        yield
    finally:
        del own.__reduce_ex__, own.__prepare_scriptable__


def _reduce(module: nn.Module, protocol: Any) -> Any:
    reduced = object.__reduce_ex__(module, protocol)
    if not isinstance(reduced, tuple) or len(reduced) < 3 or not isinstance(reduced[2], dict):
        return reduced
    planned: Any = reduced[2].get("forward")
    if not getattr(planned, "_lowtide_runtime", False):
        return reduced
    state = {name: value for name, value in reduced[2].items() if name != "forward"}
    if planned.had_instance_forward:
        state["forward"] = planned.original_forward
    return (*reduced[:2], state, *reduced[3:])


def _to_script(module: nn.Module) -> nn.Module:
    """A copy that holds the same tensors, where something in a module is planned: PyTorch asks its submodules, too, and puts
    what they answer in their place."""
    if all(runtime_of(one) is None for one in module.modules()):
        return module
    alike = copy.copy(module)
    alike.__dict__["_modules"] = module._modules.copy()
    return alike
