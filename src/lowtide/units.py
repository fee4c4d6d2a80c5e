"""Bytes and nanoseconds for people. Integers everywhere else."""

from __future__ import annotations

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_bytes(count: int) -> str:
    """``format_bytes(278139912) == "265.3 MiB"``."""
    amount = float(count)
    for unit in _BYTE_UNITS[:-1]:
        if abs(amount) < 1024:
            return f"{count} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} {_BYTE_UNITS[-1]}"


def format_time(nanoseconds: int) -> str:
    """``format_time(1_234_567) == "1.23 ms"``."""
    for unit, scale in (("s", 10**9), ("ms", 10**6), ("us", 10**3)):
        if abs(nanoseconds) >= scale:
            return f"{nanoseconds / scale:.2f} {unit}"
    return f"{nanoseconds} ns"


def format_percent(fraction: float) -> str:
    """``format_percent(0.1698) == "17.0 %"``."""
    return f"{100 * fraction:.1f} %"


def overhead_percent(time_ns: int, least_ns: int) -> float:
    """Percent above the program without recomputation, which takes ``least_ns``."""
    return 100 * (time_ns / least_ns - 1) if least_ns else 0.0


def format_source(source: str) -> str:
    """``file:line`` without what leads to it: from the package on for an installed one, else the last three parts."""
    parts = source.replace("\\", "/").split("/")
    if "site-packages" in parts:
        return "/".join(parts[parts.index("site-packages") + 1 :])
    return "/".join(parts[-3:])
