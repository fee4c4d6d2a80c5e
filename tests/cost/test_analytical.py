"""The roofline model: rates, dtypes, devices."""

from __future__ import annotations

import pytest
import torch

from lowtide.cost import analytical_costs
from lowtide.cost.devices import DEVICES, get_device
from lowtide.errors import CostError
from tests.cost.programs import program_of

aten = torch.ops.aten


def _square(size: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(size, size, device=device, dtype=dtype)


def test_matrix_products_are_bound_by_flops() -> None:
    program = program_of(("y", aten.mm.default, ("x", "x")), x=_square(4096, "meta"))
    device = get_device("a100")
    expected = device.launch_ns + 2 * 4096**3 / (19.5e12 * device.flops_share) * 1e9
    assert analytical_costs(program, "a100").time_ns[0] == pytest.approx(expected, abs=1)


def test_elementwise_operators_are_bound_by_bytes() -> None:
    program = program_of(("y", aten.relu.default, ("x",)), x=_square(4096, "meta"))
    device = get_device("h200")
    expected = device.launch_ns + 2 * 4 * 4096**2 / (4.8e12 * device.bandwidth_share) * 1e9
    assert analytical_costs(program, "H200").time_ns[0] == pytest.approx(expected, abs=1)


def test_half_precision_is_faster_and_views_are_free() -> None:
    def time_ns(dtype: torch.dtype) -> int:
        program = program_of(
            ("t", aten.t.default, ("x",)), ("y", aten.mm.default, ("x", "t")), x=_square(2048, "meta", dtype)
        )
        costs = analytical_costs(program, "h100")
        assert costs.storage_bytes.tolist() == [0, 2048**2 * dtype.itemsize]
        assert costs.time_ns[0] <= 2000
        return int(costs.time_ns[1])

    assert time_ns(torch.bfloat16) * 4 < time_ns(torch.float32)


def test_several_outputs_and_attention() -> None:
    heads = torch.empty(2, 4, 64, 32, device="meta")
    program = program_of(
        (("o", "l"), aten._scaled_dot_product_flash_attention_for_cpu.default, ("q", "q", "q")),
        ("s", aten.convolution.default, ("c", "w", None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)),
        q=heads,
        c=torch.empty(2, 3, 16, 16, device="meta"),
        w=torch.empty(4, 3, 3, 3, device="meta"),
    )
    costs = analytical_costs(program, "rtx4090")
    assert (costs.time_ns > get_device("rtx4090").launch_ns).all()
    assert (costs.workspace_bytes > 0).all()
    assert costs.device == "analytical rtx4090"


def test_the_table() -> None:
    assert tuple(DEVICES) == ("cpu", "a100", "h100", "h200", "rtx4090")
    assert get_device("RTX 4090").name == "rtx4090"
    assert get_device().name in DEVICES
    with pytest.raises(CostError, match="known are"):
        get_device("abacus")


@pytest.mark.parametrize("name", DEVICES)
def test_every_row_of_the_table(name: str) -> None:
    device = get_device(name)
    assert get_device(name.upper()) is device
    assert torch.float32 in device.flops and all(rate > 0 for rate in device.flops.values())
    assert device.bandwidth > 0 and device.launch_ns > 0
    assert 0 < device.flops_share <= 1 and 0 < device.bandwidth_share <= 1
    others = [other for other in DEVICES.values() if other is not device]
    assert not [other.name for other in others if set(other.matches) & set(device.matches)]
