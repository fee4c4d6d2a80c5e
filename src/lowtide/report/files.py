"""Files, written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from lowtide.errors import PlanError


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader sees the old or the new content, never a part. Raises ``PlanError``.

    Links are followed; what is there and no file, such as a pipe or a device, is written to.
    """
    data = content.encode() if isinstance(content, str) else content
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{secrets.token_hex(8)}")
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(data)
            return
        with open(temporary, "xb") as file:
            file.write(data)
        os.replace(temporary, target)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise PlanError(f"cannot write {path}: {error.strerror or error}.") from error
