"""The submodules of a model: which are tried as parts, and how their ``forward`` is replaced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from lowtide.capture.model_state import named_modules
from lowtide.objects.walk import class_attribute
from lowtide.program.distributed.sharded import is_sharded

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict, torch.jit.ScriptModule)


def can_run_in_parts(model: nn.Module) -> bool:
    """Whether the model has submodules to try."""
    return not any(map(is_sharded, model.modules())) and bool(tried_in(model))


def tried_in(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The submodules, with names, that a plan of their own could free memory for. Modules compiled by
    ``torch.compile``, and those inside them, are left out: Dynamo would trace the plans. (It does not trace the planned
    model itself.)"""
    first: dict[int, tuple[str, nn.Module]] = {}  # each module by its first name
    for name, module in named_modules(model):
        first.setdefault(id(module), (name, module))
    compiled = {
        id(inner) for name, module in first.values() if name and _is_compiled(module) for inner in module.modules()
    }
    tried = (named for key, named in first.items() if key not in compiled and _may_free(named[1]))
    return [(name.removesuffix("."), module) for name, module in tried if name]


def _is_compiled(module: nn.Module) -> bool:
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None


def _may_free(module: nn.Module) -> bool:
    """Whether to try the module. Cells of recurrent networks are many operators, and run in each iteration of a
    loop."""
    return isinstance(module, nn.RNNCellBase) or not (isinstance(module, _CONTAINERS) or is_one_operator(module))


def is_one_operator(module: nn.Module) -> bool:
    """Whether it is a layer of PyTorch itself, with nothing to recompute."""
    plain = type(module).__module__.startswith("torch.nn.modules.") and not any(module._modules.values())
    return plain and not isinstance(module, nn.RNNBase)  # computes many steps


def list_of(model: nn.Module, name: str) -> str | None:
    """The name of the list or dictionary of modules that contains the submodule ``name``, if any."""
    parent, _, last = name.rpartition(".")
    return parent if last.isdigit() or isinstance(model.get_submodule(parent), nn.ModuleDict) else None


def made_like(modules: Sequence[nn.Module]) -> Any:
    """A key that is equal for lists of modules with the same classes, and the same booleans and texts in attributes."""
    return tuple(
        (
            type(one),
            class_attribute(type(one), "forward"),
            *(item for item in vars(one).items() if isinstance(item[1], bool | str)),
        )
        for one in modules
    )


@contextlib.contextmanager
def forwards_given(given: Sequence[tuple[nn.Module, Any]]) -> Iterator[None]:
    """A context in which modules have these ``forward`` attributes; ``None`` stands for that of the class."""
    before = [(module, module.__dict__.get("forward")) for module, _ in given]
    try:
        for module, forward in given:
            _set(module, forward)
        yield
    finally:
        for module, forward in before:
            _set(module, forward)


def _set(module: nn.Module, forward: Any) -> None:
    if forward is None:
        module.__dict__.pop("forward", None)
    else:
        module.__dict__["forward"] = forward


def saves_otherwise() -> bool:
    """Whether code between parts checkpoints or packs saved tensors. In a checkpoint's second run no parts are used, so
    in the first run neither."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
