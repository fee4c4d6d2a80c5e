"""Units of FSDP2 (``torch.distributed.fsdp.fully_shard``) in a program: gathered parameters, reduced gradients.

A rank holds a shard of each parameter of a unit. Operators read the gathered parameter. In a program it is the result
of ``lowtide.all_gather``, an operator like any other: it can be freed and gathered again. A unit's gradients go into
one ``lowtide.reduce_scatter``, which leaves this rank's part in the ``.grad`` of the sharded parameters. Both are
FSDP2's own collectives, with its types, groups, factors and hooks, so results equal FSDP2's to the bit.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from lowtide.errors import CaptureError, PlanError
from lowtide.memory.allocators import allocated_bytes
from lowtide.program import layouts
from lowtide.program.distributed.communication import communicating, wait_for_copies

_UNITS: weakref.WeakKeyDictionary[Any, Unit] = weakref.WeakKeyDictionary()  # by FSDP2's own object
_SHARDS: Any = WeakTensorKeyDictionary()  # by the gathered form of a parameter: FSDP2's object


class GatheredForm(nn.Parameter):
    """Stands for a gathered parameter: its shape and type, without memory to read or print. If tensor parallelism has
    distributed it too, it stands for the local tensor, and ``spec`` says how that is placed."""

    @property
    def spec(self) -> Any:
        shard = _SHARDS[self]
        return None if shard._unsharded_dtensor_spec is None else shard._get_unsharded_dtensor_spec(self)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"GatheredForm({list(self.shape)}, {self.dtype})"


class Unit:
    """Parameters that are gathered together. ``forms[i]`` stands for the i-th."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.forms: tuple[GatheredForm, ...] = tuple(map(_form, group.fsdp_params))
        self.operators: dict[Any, Gather | Reduce] = {}  # operators of its programs, the same for equal arguments

    @property
    def name(self) -> str:
        """The path of its module; empty for the root."""
        return self.group._module_fqn or ""

    @property
    def ranks(self) -> int:
        """How many ranks share the parameters."""
        return int(self.group._all_gather_process_group.size())

    @property
    def groups(self) -> list[Any]:
        """The process groups that it uses: that of its shards and, if there are replicas, theirs."""
        replicas = _replicas(self.group)
        return [self.group._all_gather_process_group, *([] if replicas is None else [replicas])]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The registered parameters: the shards."""
        return [shard.sharded_param for shard in self.group.fsdp_params]

    def settle(self) -> None:
        """Free parameters that an evaluation has left gathered."""
        if not self.group.is_sharded:
            self.group._to_sharded()
        for shard, form in zip(self.group.fsdp_params, self.forms, strict=True):
            if getattr(shard, "_unsharded_param", None) is form:
                del shard._unsharded_param
            if form.requires_grad != shard.sharded_param.requires_grad:
                form.requires_grad_(shard.sharded_param.requires_grad)

    def padded_elements(self, index: int) -> int:
        """The elements of a parameter, padded so that its first dimension divides into equal parts."""
        return int(self.group.fsdp_params[index]._sharded_param_data.numel()) * self.ranks

    def describe(self, chosen: Sequence[int]) -> str:
        """Layouts and ranks of the ``chosen`` parameters, for keys and messages."""
        shapes = ",".join(f"{self.forms[i].dtype}{list(self.forms[i].shape)}" for i in chosen)
        return f"{shapes} over {self.ranks} ranks".replace("torch.", "").replace(", ", "x")


class Gather:
    """The operator that returns some of a unit's parameters, gathered from all ranks."""

    def __init__(self, unit: Unit, chosen: Sequence[int]) -> None:
        self.unit, self.chosen = unit, tuple(chosen)
        self.__name__, self.__module__ = "all_gather", "lowtide"
        self.__qualname__ = f"all_gather{{{unit.describe(range(len(unit.forms)))} as {self.chosen}}}"

    def __call__(self) -> list[torch.Tensor]:
        before = allocated_bytes(self.unit.group.device)
        found = self._begun(False)()
        wait_for_copies(before, found, self.unit.group.device)
        return found

    def begin(self) -> Callable[[], list[torch.Tensor]]:
        """Begin to gather beside computing. The returned function waits for it and returns the parameters."""
        return self._begun(True)

    def _begun(self, beside: bool) -> Callable[[], list[torch.Tensor]]:
        group, ranks = self.unit.group, self.unit.ranks
        shards = [group.fsdp_params[index] for index in self.chosen]
        if ranks == 1:
            return lambda: [_formed(shard, shard.all_gather_inputs[0].clone()) for shard in shards]
        from torch.distributed.fsdp._fully_shard._fsdp_collectives import foreach_all_gather

        stream, what = group.device_handle.current_stream(), f"gather of {self.unit.name or 'the root'}"
        with communicating(what):
            sent = foreach_all_gather(
                group.fsdp_params,
                group._all_gather_process_group,
                beside,
                stream,
                stream,
                group.device,
                group._all_gather_comm,
            )
        assert sent is not None

        def end() -> list[torch.Tensor]:
            if beside:
                with communicating(what):
                    sent.all_gather_work.wait()  # type: ignore[union-attr]
            parts = torch.split(sent.all_gather_output.view(ranks, -1), sent.all_gather_input_split_sizes, dim=1)
            return [
                _formed(shard, _unpacked(shard, parts[i], ranks)) for i, shard in zip(self.chosen, shards, strict=True)
            ]

        return end


class Reduce:
    """The operator that takes gradients of some of a unit's parameters, in the order of ``chosen``.

    It returns this rank's part of their sum (or mean), which is also in the ``.grad`` of the shards. If FSDP2 is told
    not to reduce, it keeps them.
    """

    def __init__(self, unit: Unit, chosen: Sequence[int]) -> None:
        self.unit, self.chosen = unit, tuple(chosen)
        self.__name__, self.__module__ = "reduce_scatter", "lowtide"
        self.kept_dtype: torch.dtype | None = unit.group.mp_policy.reduce_dtype  # of gradients that are not reduced yet
        self.dtype = self.kept_dtype or unit.forms[self.chosen[0]].dtype  # type that is communicated
        self.__qualname__ = f"reduce_scatter{{{unit.describe(chosen)} by {self.dtype}}}"

    def __call__(self, *gradients: torch.Tensor) -> torch.Tensor:
        before, fresh = allocated_bytes(self.unit.group.device), self.unit.parameters[self.chosen[0]].grad is None
        found = self._begun(list(gradients), False)()
        wait_for_copies(before, [found] if fresh else [], self.unit.group.device)
        return found

    def begin(self, *gradients: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to reduce beside computing, on FSDP2's own streams. The returned function waits for it."""
        return self._begun(list(gradients), True)

    def _begun(self, gradients: list[torch.Tensor], beside: bool) -> Callable[[], torch.Tensor]:
        group = self.unit.group
        shards = [group.fsdp_params[index] for index in self.chosen]
        with torch.no_grad():
            for place, shard in enumerate(shards):
                if shard.unsharded_accumulated_grad is not None:
                    shard.unsharded_accumulated_grad += gradients[place]
                    gradients[place] = shard.unsharded_accumulated_grad
                shard.unsharded_accumulated_grad = None
            if not group.reduce_grads:
                for index, shard, gradient in zip(self.chosen, shards, gradients, strict=True):
                    shard.unsharded_accumulated_grad = gradient.to(shard.reduce_dtype or gradient.dtype)
                    if not hasattr(shard, "_unsharded_param"):  # a later reduction asks it for its gradient too
                        shard._unsharded_param = self.unit.forms[index]
                return lambda: torch.empty(0, device=group.device)
            with communicating(f"reduction of {self.unit.name or 'the root'}"):
                held = reduced(group, shards, gradients, beside)
        group._partial_reduce_output = held[-1]

        def end() -> torch.Tensor:
            group.device_handle.current_stream().wait_event(held[3])  # until then what it reads and writes is ``held``
            for shard in shards:
                if shard.grad_offload_event is not None:
                    shard.grad_offload_event.synchronize()
                    shard.grad_offload_event = None
            kept = shards[0].sharded_param.grad
            return torch.empty(0, device=group.device) if kept is None else kept.to_local()

        return end

    def rehearsal(self) -> Callable[..., torch.Tensor]:
        """The same operator for shards that nobody holds."""

        def reduce(*gradients: torch.Tensor) -> torch.Tensor:
            group = copy.copy(self.unit.group)
            shards = [copy.copy(group.fsdp_params[index]) for index in self.chosen]
            group._partial_reduce_output, group._all_reduce_hook = None, None
            for shard in shards:
                shard.sharded_param = nn.Parameter(shard.sharded_param.detach())
            with torch.no_grad():
                reduced(group, shards, list(gradients), False)
            return shards[0].sharded_param.grad.to_local()  # type: ignore[no-any-return]

        return reduce


def reduced(group: Any, shards: Sequence[Any], gradients: list[torch.Tensor], beside: bool) -> Sequence[Any]:
    """FSDP2's own reduction of ``gradients``, a list that it empties, on the current stream or, ``beside`` it, on FSDP2's.
    Returns what FSDP2 returns: the fourth is the event of its end, the last what is left to reduce among replicas."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import foreach_reduce

    now, own = group.device_handle.current_stream(), group.comm_ctx
    given = {
        "fsdp_params": shards,
        "unsharded_grads": gradients,
        "reduce_scatter_group": group._reduce_scatter_process_group,
        "reduce_scatter_stream": own.reduce_scatter_stream if beside else now,
        "reduce_scatter_comm": group._reduce_scatter_comm,
        "orig_dtype": group._orig_dtype,
        "reduce_dtype": group._reduce_dtype,
        "device": group.device,
        "gradient_divide_factor": group.gradient_divide_factor,
        "all_reduce_group": _replicas(group),
        "all_reduce_stream": own.all_reduce_stream if beside else now,
        "all_reduce_grads": group.all_reduce_grads,
        "partial_reduce_output": group._partial_reduce_output,
        "all_reduce_hook": group._all_reduce_hook,
        "force_sum_reduction_for_comms": group.force_sum_reduction_for_comms,
    }
    known = inspect.signature(foreach_reduce).parameters
    return foreach_reduce(**{name: given[name] for name in known})


def is_sharded(module: object) -> bool:
    """Whether ``fully_shard`` was applied to this module itself."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def state_of(module: nn.Module) -> Any:
    """FSDP2's state of a sharded module."""
    return module._get_fsdp_state()  # type: ignore[operator]


def units_of(model: nn.Module) -> list[Unit]:
    """The units of a model that is sharded itself, in the order of its modules. Raises ``CaptureError`` if they hold
    anything but shards of plain tensors, and ``PlanError`` if PyTorch's FSDP2 differs from what is known."""
    if not is_sharded(model):
        return []
    found = dict.fromkeys(state_of(module) for module in model.modules() if is_sharded(module))
    return [_unit(group) for state in found for group in getattr(state, "_fsdp_param_groups", [state])]


def begun(model: nn.Module) -> list[Unit]:
    """The units of a model between calls: with all parameters sharded."""
    units = units_of(model)
    if units:
        with _meta_allowed() if any(p.is_meta for p in units[0].parameters) else contextlib.nullcontext():
            state_of(model)._lazy_init()
    for unit in units:
        unit.settle()
    return units


@contextlib.contextmanager
def _meta_allowed() -> Iterator[None]:
    """A context in which FSDP2 accepts parameters without data. They can be planned for, not trained."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    check: Any = FSDPParamGroup._validate_no_meta_params
    FSDPParamGroup._validate_no_meta_params = lambda self: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        FSDPParamGroup._validate_no_meta_params = check  # type: ignore[method-assign]


def version_of(tensor: torch.Tensor) -> int | None:
    """The version counter of the tensor, or of the shard that it is gathered from."""
    if tensor.is_inference():
        return None
    shard = _SHARDS.get(tensor) if type(tensor) is GatheredForm else None
    if shard is None:
        return tensor._version
    return int(shard.sharded_param._version + shard._sharded_param_data._version)


def _unit(group: Any) -> Unit:
    unit = _UNITS.get(group)
    if unit is None:
        _refuse_other(group)
        unit = _UNITS[group] = Unit(group)
    return unit


def _refuse_other(group: Any) -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

    if not all(hasattr(shard, "_get_unsharded_dtensor_spec") for shard in getattr(group, "fsdp_params", [None])):
        raise PlanError(
            f"models sharded by fully_shard are planned with PyTorch 2.13; {torch.__version__} has another FSDP2."
        )
    what = ""
    if not isinstance(group.mesh_info, FSDPMeshInfo):
        what = "replicates its parameters (torch.distributed's replicate): use DistributedDataParallel"
    elif group.mesh_info.is_spmd_mesh:
        what = "shards over dimensions of a mesh that its parameters lie on already (dp_mesh_dims)"
    elif any(hasattr(shard._sharded_local_tensor, "fsdp_pre_all_gather") for shard in group.fsdp_params):
        what = "has parameters that gather themselves (fsdp_pre_all_gather, as float8 tensors do)"
    if what:
        raise CaptureError(f"a unit of fully_shard ({group.modules[0]._get_name()}) {what}, which cannot be planned.")


def _form(shard: Any) -> GatheredForm:
    wanted = shard.mp_policy.param_dtype if shard.sharded_param.dtype.is_floating_point else None
    device = shard.sharded_param.device if shard.sharded_param.is_meta else shard.device
    dtype = wanted or shard.sharded_param.dtype
    hollow = layouts.hollow(shard._orig_size, shard._contiguous_orig_stride, dtype, device)
    form = GatheredForm(hollow, requires_grad=shard.sharded_param.requires_grad)
    _SHARDS[form] = shard
    return form


def _replicas(group: Any) -> Any:
    """The process group in which reduced gradients are summed again (HSDP), if there is one."""
    return getattr(group.mesh_info, "replicate_process_group", None)


def _formed(shard: Any, flat: torch.Tensor) -> torch.Tensor:
    return flat.as_strided(shard._orig_size, shard._contiguous_orig_stride, 0)


def _unpacked(shard: Any, part: torch.Tensor, ranks: int) -> torch.Tensor:
    """The parameter in its own memory, from the shards of all ranks."""
    dtype = shard.param_dtype or shard.orig_dtype
    if part.dtype != dtype:  # bytes if a unit has several types
        part = part.contiguous().view(dtype)
    dim = shard.fsdp_placement.dim
    if dim == 0:
        # For shards of one element, ``reshape`` is a view.
        return part.clone(memory_format=torch.contiguous_format).view(-1)
    chunks = [row.view(shard.padded_sharded_param_size) for row in part]
    return torch.cat(chunks, dim=dim).view(-1)
