"""Peak rates of devices, and the part of them that operators reach.

Peak rates are from the makers' data sheets, dense, without sparsity: NVIDIA A100 80GB SXM (19.5 TFLOP/s float32, 312
bf16/fp16, 9.7 float64, 2039 GB/s), H100 SXM (67, 989, 34, 3.35 TB/s), H200 SXM (the same chip, 4.8 TB/s), GeForce RTX
4090 (Ada whitepaper: 82.6, 165 with fp32 accumulation, 1.29, 1008 GB/s). Links to the host are 16 lanes of PCI Express
4 (31.5 GB/s each way) and 5 (63). ``cpu`` is two generic server cores with AVX2: 2 cores x 3 GHz x 32 float32
operations, and the bandwidth that two such cores sustain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from lowtide.device import accelerators, interface_of
from lowtide.errors import CostError


@dataclass(frozen=True, slots=True)
class Device:
    """Peak rates of a device.

    ``flops``: floating-point operations per second by dtype. ``bandwidth``: bytes per second of its memory. ``link``:
    bytes per second to and from the host's memory, in each direction, 0 if it shares that memory. ``flops_share``,
    ``bandwidth_share``: the parts of the peaks that large operators reach. ``launch_ns``: minimum time of any operator.
    ``matches``: parts of the maker's names for it. ``ranks``: name of the link (``cost.links``) to devices of its kind.
    """

    name: str
    flops: Mapping[torch.dtype, float]
    bandwidth: float
    launch_ns: int
    flops_share: float
    bandwidth_share: float
    matches: tuple[str, ...] = ()
    link: float = 0.0
    ranks: str = "ethernet-25"

    def flops_per_second(self, dtype: torch.dtype) -> float:
        """The rate for this dtype; that of float32 for dtypes not in the table."""
        return self.flops.get(dtype, self.flops[torch.float32])


def _rates(float32: float, half: float, float64: float) -> Mapping[torch.dtype, float]:
    return MappingProxyType({torch.float32: float32, torch.float64: float64, torch.float16: half, torch.bfloat16: half})


_DEVICES = (
    Device("cpu", _rates(192e9, 96e9, 96e9), 25e9, 3_000, 0.6, 0.6),
    Device("a100", _rates(19.5e12, 312e12, 9.7e12), 2.039e12, 5_000, 0.6, 0.8, ("A100",), 31.5e9, "nvlink3"),
    Device("h100", _rates(67e12, 989e12, 34e12), 3.35e12, 5_000, 0.6, 0.8, ("H100",), 63e9, "nvlink4"),
    Device("h200", _rates(67e12, 989e12, 34e12), 4.8e12, 5_000, 0.6, 0.8, ("H200",), 63e9, "nvlink4"),
    Device("rtx4090", _rates(82.6e12, 165.2e12, 1.29e12), 1.008e12, 5_000, 0.6, 0.8, ("4090",), 31.5e9, "pcie4"),
)
DEVICES = {device.name: device for device in _DEVICES}


def get_device(name: str = "auto") -> Device:
    """The device with this name. ``"auto"`` is the machine's accelerator if it is in the table, else the generic CPU.
    Raises ``CostError`` for an unknown name."""
    if name == "auto":
        return _of_maker(next((each.name() for each in accelerators()), ""))
    simple = name.lower().replace(" ", "").replace("-", "").replace("_", "")
    if simple not in DEVICES:
        raise CostError(f'device {name!r} is not in the table; known are "auto", {", ".join(DEVICES)}.')
    return DEVICES[simple]


def device_of(device: torch.device) -> Device:
    """The table's entry for a device of this machine, else the generic CPU."""
    return _of_maker(device_name(device))


def _of_maker(name: str) -> Device:
    return next((each for each in _DEVICES if any(word in name for word in each.matches)), DEVICES["cpu"])


def device_name(device: torch.device) -> str:
    """The maker's name of the device; for a CPU with the number of cores that the process may use."""
    return interface_of(device).name()
