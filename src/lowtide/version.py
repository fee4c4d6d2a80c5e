"""The version of this package."""

__version__ = "0.1.0"

# Raised with every change of what src/lowtide/_native.pyi declares; the extension carries the one that it was built for.
NATIVE_INTERFACE = 11
