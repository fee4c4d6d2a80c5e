"""A mesh of devices that need not exist: a process group that does not communicate, and a model spread over it.

Its dimensions are ``pp``, of which the model is one stage; ``replicate`` and ``dp``, over which FSDP2 replicates and
shards (every block of a list of modules, then the rest); and ``tp``, over which layers are parallel by columns and
rows. A model that is already distributed is used as it is.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from lowtide.capture.copies import copy_without_data
from lowtide.capture.model_state import model_state
from lowtide.cost.devices import get_device
from lowtide.cost.links import LINKS, Link, get_link
from lowtide.errors import CostError, PlanError
from lowtide.program.distributed.local import is_distributed
from lowtide.program.distributed.sharded import is_sharded

_DIMENSIONS = ("pp", "replicate", "dp", "tp")  # outermost first
_MOST_RANKS = 1 << 20
_MADE: list[Any] = []  # the mesh of the open ``pretended`` context


def parse_mesh(text: str) -> dict[str, int]:
    """Parse ``"dp=8,tp=4"`` into sizes by dimension, outermost first. Raises ``PlanError``."""
    found: dict[str, int] = {}
    for part in text.split(",") if isinstance(text, str) else [""]:
        match = re.fullmatch(r"\s*(\w+)\s*=\s*(\d+)\s*", part)
        if match is None or match[1] not in _DIMENSIONS or match[1] in found or int(match[2]) < 1:
            raise PlanError(
                f'mesh {text!r} is not understood: give sizes by dimension, each once, such as "dp=8,tp=4"; dimensions are '
                f"{', '.join(_DIMENSIONS)}."
            )
        found[match[1]] = int(match[2])
    sizes = {name: found[name] for name in _DIMENSIONS if name in found}
    if "replicate" in sizes and "dp" not in sizes:
        raise PlanError(f"mesh {text!r} replicates what is not sharded; give dp= too, or dp= alone.")
    ranks = torch.Size(sizes.values()).numel()
    if ranks > _MOST_RANKS:
        raise PlanError(f"mesh {text!r} has {ranks} ranks; {_MOST_RANKS} are the most.")
    return sizes


def parse_links(text: str | None, sizes: Mapping[str, int], device: str) -> dict[str, Link]:
    """Parse ``"nvlink"`` or ``"tp=nvlink,dp=infiniband-ndr"`` into the link of each dimension; default: the device's
    own. The name of a family means the device's own link if it belongs to it, else the first in the table. Raises
    ``PlanError``."""
    if not isinstance(text, str | None):
        raise PlanError(
            f'link {text!r} is not understood: give a name, or one for each dimension, "tp=nvlink,dp=pcie5".'
        )
    own = get_device(device).ranks
    found = dict.fromkeys(sizes, get_link(own))
    for part in (text or "").split(",") if text else []:
        name, equals, given = (piece.strip() for piece in part.partition("="))
        link = _link(given if equals else name, own)
        if equals and name not in sizes:
            raise PlanError(f"link {text!r} names dimension {name!r}, but the mesh has {', '.join(sizes)}.")
        found |= {name: link} if equals else dict.fromkeys(sizes, link)
    return found


def _link(name: str, own: str) -> Link:
    family = [known for known in LINKS if known.startswith(name)] if name else []
    try:
        return get_link(own if own in family else family[0] if family else name)
    except CostError as error:
        raise PlanError(str(error)) from None


@contextlib.contextmanager
def pretended(sizes: Mapping[str, int]) -> Iterator[Any]:
    """A context with a process group of so many ranks, of which this process is the first, and a mesh of them.
    Collectives return at once; their results are never used. Raises ``PlanError`` if a process group exists."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if torch.distributed.is_initialized():
        raise PlanError(
            "a mesh on paper takes the place of the process group, but there is one; plan in a process alone."
        )
    ranks = torch.Size(sizes.values()).numel()
    torch.distributed.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        _MADE.append(init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes)))
        yield _MADE[-1]
    finally:
        _MADE.clear()
        torch.distributed.destroy_process_group()


def current_mesh() -> Any:
    """The mesh of the open ``pretended`` context, or ``None``."""
    return _MADE[-1] if _MADE else None


def spread(model: nn.Module, mesh: Any) -> nn.Module:
    """A copy of ``model``, tensor-parallel over ``tp`` and sharded over ``dp``. A model that is already distributed is
    not copied, only sharded if it is not. Raises ``PlanError`` if the model does not define its tensor parallelism."""
    names = mesh.mesh_dim_names
    if not any(map(is_distributed, model.parameters())):
        tensors = model_state(model).registered
        model, _ = copy_without_data(model, tensors, [*map(_hollow, tensors)])
        if "tp" in names and mesh["tp"].size() > 1:
            from torch.distributed.tensor.parallel import parallelize_module

            parallelize_module(model, mesh["tp"], _styles(model), src_data_rank=None)
    shards = tuple(name for name in ("replicate", "dp") if name in names)
    if shards and not is_sharded(model):
        from torch.distributed.fsdp import fully_shard

        inner = mesh[shards] if len(shards) > 1 else mesh[shards[0]]
        for block in blocks_of(model):
            fully_shard(block, mesh=inner)
        fully_shard(model, mesh=inner)
    return model


def _hollow(tensor: torch.Tensor) -> torch.Tensor:
    """For a parameter, one with the same layout and untouched memory; for other tensors a copy, since their values may
    be read."""
    if type(tensor) is nn.Parameter:
        return nn.Parameter(torch.empty_like(tensor), tensor.requires_grad)
    return copy.deepcopy(tensor) if tensor.is_leaf else tensor.detach().clone()


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The outermost modules in lists of several modules of one class: they are sharded, or checkpointed, one by one."""
    found: list[nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():
        children = list(module.children())
        alike = isinstance(module, nn.ModuleList) and len(children) > 1 and len(set(map(type, children))) == 1
        if alike and id(module) not in inside:
            found += children
            inside.update(id(each) for child in children for each in child.modules())
    return found


def link_of(mesh: Any, links: Mapping[str, Link]) -> Callable[[tuple[int, ...]], Link]:
    """Maps the ranks of a group to the slowest link of the dimensions that it spans."""
    grid = mesh.mesh
    spanned: dict[tuple[int, ...], Link] = {}
    for count in range(1, len(links) + 1):
        for names in itertools.combinations(links, count):
            index = tuple(slice(None) if name in names else 0 for name in mesh.mesh_dim_names)
            spanned[tuple(grid[index].flatten().tolist())] = min(
                (links[n] for n in names), key=lambda one: one.bandwidth
            )
    slowest = min(links.values(), key=lambda one: one.bandwidth)
    return lambda members: spanned.get(members, slowest)


def _styles(model: nn.Module) -> dict[str, Any]:
    """The parallel style of the layers of a transformers model, by pattern of module names."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    known: dict[str, Any] = {
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(),
        "colwise_rep": ColwiseParallel(output_layouts=Replicate()),
        "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
        "embedding_rowwise": RowwiseParallel(input_layouts=Replicate()),
    }
    plan: Mapping[str, str] = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None) or {}
    if not plan:
        raise PlanError(
            f"{type(model).__name__} does not say how its layers are parallel (a tp_plan, as models of transformers have). Let "
            "the function that builds it take the mesh, and call parallelize_module(model, mesh['tp'], ...) there."
        )
    other = sorted({style for style in plan.values() if style not in known})
    if other:
        raise PlanError(
            f"the tp_plan of {type(model).__name__} has styles that are not known here ({', '.join(other)}). Let the function "
            "that builds the model take the mesh, and call parallelize_module there."
        )
    return {pattern: known[style] for pattern, style in plan.items()}
