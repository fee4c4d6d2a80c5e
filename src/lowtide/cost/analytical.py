"""Costs without a device, from FLOPs and bytes of operators and peak rates (the roofline model).

time = launch + max(FLOPs / sustained FLOP rate, bytes read and written / sustained bandwidth). FLOPs come from the
formulas of ``torch.utils.flop_counter``; an operator without a formula is bound by its bytes. Williams, Waterman,
Patterson: Roofline, CACM 52(4), 2009. The time of collectives comes from ``cost.links``, their workspace from
``cost.on_links``.

The workspace is a rule of thumb, rather above observed values: operators that copy their arguments into another layout
(convolutions, attention, sorting, scatter) get the bytes of their arguments and results, others those of a wrapped
number.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lowtide.cost.devices import Device, get_device
from lowtide.cost.links import Link, get_link
from lowtide.cost.on_links import collective_workspace, collectives_in
from lowtide.cost.signature import target_name
from lowtide.ir import Costs, is_view
from lowtide.ir.graph import OPTIMIZER_TARGET, TANGENT_TARGET
from lowtide.program.layouts import distinct_elements
from lowtide.program.program import Program, TensorMeta
from lowtide.program.references import map_references
from lowtide.program.sizes import storage_bytes

LinkOf = Callable[[tuple[int, ...]], Link]
_COPYING = ("convolution", "attention", "sort", "topk", "index_put", "scatter", "unique", "cum", "fft", "linalg")
_WRAPPED_NUMBER_BYTES = 16
_VIEW_NS = 1_500


def analytical_costs(program: Program, device_name: str = "auto", link_of: LinkOf | None = None) -> Costs:
    """Modelled time and workspace of every op on ``device_name``, a name in the table of ``cost.devices``. ``link_of``:
    maps the ranks of a group to the link between them; default: the device's own link."""
    device = get_device(device_name)
    ops = program.graph.ops
    return Costs(
        [operator_time_ns(program, op.id, device, link_of) for op in ops],  # type: ignore[arg-type]
        [workspace_bytes(program, op.id) for op in ops],  # type: ignore[arg-type]
        storage_bytes(program),  # type: ignore[arg-type]
        device=f"analytical {device.name}",
        collectives_beside=device.name != "cpu" and any(op.collective for op in ops),
    )


def operator_time_ns(program: Program, op: int, device: Device, link_of: LinkOf | None = None) -> int:
    """Modelled time of one op in nanoseconds. ``link_of``: as for ``analytical_costs``."""
    node = program.graph.ops[op]
    if node.target == TANGENT_TARGET:
        return 0
    if together := collectives_in(program, op):
        own = get_link(device.ranks)
        return sum(each.time_ns(link_of(each.members) if link_of else own) for each in together)
    if is_view(program.graph, node) and not node.effect:
        return min(_VIEW_NS, device.launch_ns)
    dtype = program.metas[node.outputs[0]].dtype if node.outputs else torch.float32
    flops_s = _flops(program, op) / (device.flops_per_second(dtype) * device.flops_share)
    bytes_s = operand_bytes(program, op) / (device.bandwidth * device.bandwidth_share)
    return device.launch_ns + round(1e9 * max(flops_s, bytes_s))


def operand_bytes(program: Program, op: int) -> int:
    """Bytes of arguments and results. As a workspace this is more than operators are known to need."""
    node = program.graph.ops[op]
    metas = [program.metas[value] for value in (*set(node.inputs), *node.outputs)]
    return sum(
        distinct_elements(meta.shape, meta.stride) * meta.dtype.itemsize if meta.entries is None else meta.storage_bytes
        for meta in metas
    )


def workspace_bytes(program: Program, op: int) -> int:
    node = program.graph.ops[op]
    if node.target == TANGENT_TARGET or is_view(program.graph, node):
        return 0
    if (inside := collective_workspace(program, op)) is not None:
        return inside
    if node.target == OPTIMIZER_TARGET:  # one tensor as large as the parameter
        return program.metas[node.inputs[0]].storage_bytes
    name = target_name(program.calls[op].target)
    return operand_bytes(program, op) if any(word in name for word in _COPYING) else _WRAPPED_NUMBER_BYTES


def _flops(program: Program, op: int) -> int:
    from torch.utils.flop_counter import flop_registry

    call = program.calls[op]
    packet = getattr(call.target, "overloadpacket", None)
    if packet not in flop_registry:
        return 0
    args, kwargs = map_references((call.args, call.kwargs), lambda ref: _meta_tensor(program.metas[ref.value]))
    outputs = [_meta_tensor(program.metas[value]) for value in program.graph.ops[op].outputs]
    if call.positions is None:
        return int(flop_registry[packet](*args, **kwargs, out_val=outputs[0]))
    by_position = dict(zip(call.positions, outputs, strict=True))
    results = tuple(by_position.get(position) for position in range(max(by_position, default=-1) + 1))
    return int(flop_registry[packet](*args, **kwargs, out_val=results))


def _meta_tensor(meta: TensorMeta) -> torch.Tensor:
    return torch.empty(meta.shape, dtype=meta.dtype, device="meta")
