"""The version of this package."""

__version__ = "0.1.0"

# Raise it with every change of src/lowtide/_native.pyi; the extension contains the number that it was built for.
NATIVE_INTERFACE = 11
