"""Finds the place in the user's program that an operator comes from."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from types import FrameType

import torch

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parent.parent)
_LIBRARY = sysconfig.get_path("stdlib")
_SCRIPTS = sysconfig.get_path("scripts")  # lowtide, torchrun


def is_user_file(filename: str) -> bool:
    """Whether ``filename`` belongs to the model rather than to torch, lowtide or the standard library."""
    if filename.startswith((_TORCH, _OURS, _SCRIPTS, "<")):
        return False
    return "site-packages" in filename or not filename.startswith(_LIBRARY)


def user_source() -> str:
    """Return ``file:line`` of the innermost frame outside torch, lowtide and the standard library, or an empty string."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if is_user_file(filename):
            return f"{filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
