"""Settings that must stand before torch is imported."""

from __future__ import annotations

import os

# Tests are of planners as they are, not of plans made before.
os.environ.setdefault("LOWTIDE_PLAN_CACHE", "0")
