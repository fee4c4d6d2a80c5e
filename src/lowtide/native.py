"""The compiled extension ``lowtide._native`` as ``core``; checks that it exists and was built for this version."""

from __future__ import annotations

from lowtide.errors import NativeCoreError
from lowtide.version import NATIVE_INTERFACE, __version__

try:
    import lowtide._native as core
except ImportError as error:
    raise NativeCoreError(
        f"lowtide {__version__} cannot load its compiled core ({error}); install it again: "
        "pip install --force-reinstall --no-deps lowtide, or, from its sources, which takes a C++20 compiler, pip install -e ."
    ) from error


def check_built_for(version: str, interface: int, path: str) -> None:
    """Raise ``NativeCoreError`` if the extension was built for another version or interface than this package's."""
    if (version, interface) != (__version__, NATIVE_INTERFACE):
        raise NativeCoreError(
            f"{path} was built for lowtide {version} (interface {interface}), not for this lowtide {__version__} "
            f"(interface {NATIVE_INTERFACE}); install it again: pip install --force-reinstall --no-deps lowtide, or, from its "
            "sources, pip install -e ."
        )


check_built_for(*core.built_for, str(core.__file__))

__all__ = ["check_built_for", "core"]
