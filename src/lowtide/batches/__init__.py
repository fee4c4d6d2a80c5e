"""The largest batch that trains inside a memory budget."""

from lowtide.batches.find import max_batch
from lowtide.batches.result import MaxBatch

__all__ = ["MaxBatch", "max_batch"]
