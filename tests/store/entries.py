"""Entries of caches with valid digests, whatever they hold."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def signed(format: str, document: Any) -> str:
    """An entry of ``format`` as ``lowtide.store`` writes them."""
    entry = json.dumps(document)
    digest = hashlib.sha256(entry.encode()).hexdigest()
    return f'{{"format": {json.dumps(format)}, "sha256": "{digest}", "entry": {entry}}}'
