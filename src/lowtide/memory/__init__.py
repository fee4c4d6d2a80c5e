"""Measure what PyTorch's allocators hand out: a counter under the CPU allocator, and meters of peak and time."""
