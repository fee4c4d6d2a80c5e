"""Files, written whole or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from lowtide.errors import PlanError


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader sees the old or the new content, never a part. Raises ``PlanError``."""
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise PlanError(f"cannot write {path}: {error.strerror or error}.") from error
