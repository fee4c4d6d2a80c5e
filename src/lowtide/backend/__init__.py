"""``torch.compile(model, backend="lowtide", options={"budget": "8GiB"})``."""

from lowtide.backend.compile import backend, register

__all__ = ["backend", "register"]
