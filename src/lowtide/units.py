"""Bytes and nanoseconds as text for people. Everywhere else, they are integers."""

from __future__ import annotations

from collections.abc import Mapping

BYTE_UNITS = {"TiB": 1 << 40, "GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "B": 1}
TIME_UNITS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}


def format_bytes(count: int) -> str:
    """``format_bytes(278139912) == "265.3 MiB"``."""
    unit, scale = largest_unit(count, BYTE_UNITS)
    return f"{count} B" if unit == "B" else f"{count / scale:.1f} {unit}"


def exact_bytes(count: int) -> str:
    """``exact_bytes(278139912) == "265.3 MiB (278139912 bytes)"``."""
    return f"{format_bytes(count)} ({count} bytes)"


def format_time(nanoseconds: int) -> str:
    """``format_time(1_234_567) == "1.23 ms"``."""
    unit, scale = largest_unit(nanoseconds, TIME_UNITS)
    return f"{nanoseconds} ns" if unit == "ns" else f"{nanoseconds / scale:.2f} {unit}"


def largest_unit(amount: float, units: Mapping[str, int]) -> tuple[str, int]:
    """Name and size of the first unit that ``amount`` reaches, else of the last. ``units``: largest first."""
    reached = ((name, size) for name, size in units.items() if abs(amount) >= size)
    return next(reached, list(units.items())[-1])


def format_percent(fraction: float) -> str:
    """``format_percent(0.1698) == "17.0 %"``."""
    return f"{100 * fraction:.1f} %"


def overhead(time_ns: int, base_ns: int) -> float:
    """Extra time as a fraction of ``base_ns``, the time of the program without recomputation."""
    return time_ns / base_ns - 1 if base_ns else 0.0


def overhead_percent(time_ns: int, base_ns: int) -> float:
    """``overhead`` in percent."""
    return 100 * overhead(time_ns, base_ns)


def format_source(source: str) -> str:
    """``file:line`` in short: from the package on for an installed package, else the last three path parts."""
    parts = source.replace("\\", "/").split("/")
    if "site-packages" in parts:
        return "/".join(parts[parts.index("site-packages") + 1 :])
    return "/".join(parts[-3:])
