"""What processes of a training tell each other by the store of the default process group, without a collective."""

from __future__ import annotations

import zlib
from typing import Any

import msgspec
import torch


def default_store() -> Any:
    """The store at which all processes meet."""
    return torch.distributed.distributed_c10d._get_default_store()


def tell(store: Any, key: str, message: Any) -> None:
    """Leave ``message``, of parts that JSON knows or ``None``, at ``key``."""
    store.set(key, zlib.compress(msgspec.json.encode(message)))


def told(store: Any, key: str) -> Any:
    """The message at ``key``, which is waited for."""
    return msgspec.json.decode(zlib.decompress(bytes(store.get(key))))
