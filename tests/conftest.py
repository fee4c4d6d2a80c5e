"""Settings that must stand before torch is imported."""

from __future__ import annotations

import os

# oneDNN keeps the operators that it prepared, 1,024 of them, each with a few bytes from PyTorch's allocator. Once one test
# process has prepared more, every new one frees the bytes of an old one, in the middle of what is being measured. The whole
# suite prepares more than 65,536. (The second name is that of PyTorch's own layer above oneDNN.)
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "100000000")
os.environ.setdefault("LRU_CACHE_CAPACITY", "100000000")

# Tests are of planners as they are, not of plans made before.
os.environ.setdefault("LOWTIDE_PLAN_CACHE", "0")
