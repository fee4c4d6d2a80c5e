"""Bandwidth and latency of links between ranks, and the modelled time of collectives on them.

Latencies are those of NCCL's own model (``src/graph/tuning.cc``, rings with the protocol for large messages): 8.4 us to
start a collective, and for each step 3.4 us on NVLink, 5.7 us on PCI Express, 9.6 us on a network. Bandwidths are peaks
in each direction. A ring reaches a part of them, ``share`` (0.8 for all, as for accelerator memory in
``cost.devices``).
"""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.errors import CostError

_BEGIN_NS = 8_400
_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class Link:
    """``bandwidth``: peak bytes per second that a rank sends, and receives at the same time. ``share``: the part of it
    that large messages reach. ``step_ns``: latency of one step from a rank to another in ns."""

    name: str
    bandwidth: float
    step_ns: int
    share: float = _SHARE


_LINKS = (
    Link("nvlink5", 900e9, 3_400),  # B200: 1800 GB/s both ways (NVIDIA's data sheet)
    Link("nvlink4", 450e9, 3_400),  # H100, H200: 18 links of 50 GB/s both ways (data sheet: 900 GB/s)
    Link("nvlink3", 300e9, 3_400),  # A100: 12 links of 50 GB/s both ways (data sheet: 600 GB/s)
    Link("pcie5", 63e9, 5_700),  # 16 lanes of PCI Express 5, 32 GT/s with 128b/130b coding
    Link("pcie4", 31.5e9, 5_700),  # 16 lanes of PCI Express 4, 16 GT/s with 128b/130b coding
    Link("infiniband-ndr", 50e9, 9_600),  # one NDR adapter per GPU, 400 Gbit/s (ConnectX-7)
    Link("infiniband-hdr", 25e9, 9_600),  # one HDR adapter per GPU, 200 Gbit/s (ConnectX-6)
    Link("ethernet-100", 12.5e9, 9_600),  # 100 Gbit/s
    Link("ethernet-25", 3.125e9, 9_600),  # 25 Gbit/s
)
LINKS = {link.name: link for link in _LINKS}
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send", "recv")


def get_link(name: str) -> Link:
    """The link with this name. Raises ``CostError`` for an unknown name."""
    if name not in LINKS:
        raise CostError(f"link {name!r} is not in the table; known are {', '.join(LINKS)}.")
    return LINKS[name]


def collective_ns(kind: str, size: int, ranks: int, link: Link) -> int:
    """Nanoseconds of a collective of ``ranks`` ranks on ``size`` bytes: with n ranks and B = ``bandwidth`` x ``share``

    ==================  ==============================  =======  ========================================================
    kind                bytes a rank sends              steps    ``size``
    ==================  ==============================  =======  ========================================================
    ``all_gather``      size (n - 1) / n                n - 1    of the whole result (ring)
    ``reduce_scatter``  size (n - 1) / n                n - 1    of the whole input (ring)
    ``all_reduce``      2 size (n - 1) / n              2 n - 2  of a rank's tensor (a ring of both of the former)
    ``all_to_all``      size (n - 1) / n                n - 1    of what a rank has for all, itself included (pairwise)
    ``broadcast``       size                            n - 1    of the tensor (a ring, in pieces)
    ``send``, ``recv``  size                            1        of the tensor
    ==================  ==============================  =======  ========================================================

    time = 8.4 us + steps x ``step_ns`` + bytes / B. Among 1 rank nothing is sent. Raises ``CostError`` for an unknown kind.
    """
    if kind not in KINDS:
        raise CostError(f"collective {kind!r} is unknown; known are {', '.join(KINDS)}.")
    if ranks <= 1:
        return 0
    if kind in ("send", "recv"):
        steps, sent = 1, float(size)
    elif kind == "broadcast":
        steps, sent = ranks - 1, float(size)
    else:
        rounds = 2 if kind == "all_reduce" else 1
        steps, sent = rounds * (ranks - 1), rounds * size * (ranks - 1) / ranks
    return _BEGIN_NS + steps * link.step_ns + round(1e9 * sent / (link.bandwidth * link.share))
