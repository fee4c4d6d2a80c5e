"""Optional dependencies, imported on demand."""

from __future__ import annotations

import importlib
from dataclasses import KW_ONLY, dataclass
from types import ModuleType

from lowtide.errors import LowtideError

# The extra of this package that installs each module.
EXTRAS = {
    "rich": "cli",
    "matplotlib": "viz",
    "jinja2": "viz",
    "highspy": "ilp",
    "transformers": "hf",
    "diffusers": "hf",
    "accelerate": "hf",
    "peft": "hf",
    "pytorch_lightning": "lightning",
}


@dataclass(eq=False, repr=False)
class MissingExtraError(LowtideError):
    """An optional dependency is not installed. ``extra``: the extra that installs it."""

    _: KW_ONLY
    extra: str


def require(module: str) -> ModuleType:
    """Import ``module``, whose top package is in ``EXTRAS``. Raises ``MissingExtraError``, which says what to
    install."""
    package = module.partition(".")[0]
    extra = EXTRAS[package]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise MissingExtraError(
            f"this needs {package}, which is not installed; run: pip install 'lowtide[{extra}]'", extra=extra
        ) from error
