"""The largest batch that trains inside a memory budget."""

from lowtide.batches.find import MaxBatch, max_batch

__all__ = ["MaxBatch", "max_batch"]
