"""Devices of NVIDIA, and of AMD, which PyTorch also calls ``cuda``."""

from __future__ import annotations

from lowtide.device.accelerator import Accelerator


class Cuda(Accelerator):
    """The caching allocator hands out multiples of 512 bytes. Its free blocks may be larger: see ``place.caching``."""

    granularity_bytes = 512
