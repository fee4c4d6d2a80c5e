"""Settings that must stand before torch is imported."""

from __future__ import annotations

import os

# oneDNN keeps the operators that it prepared, 1,024 of them, each with a few bytes from PyTorch's allocator. Once one test
# process has prepared more, every new one frees the bytes of an old one, in the middle of what is being measured.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "65536")

# Tests are of planners as they are, not of plans made before.
os.environ.setdefault("LOWTIDE_PLAN_CACHE", "0")
