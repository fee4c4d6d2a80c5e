"""What PyTorch's allocators hand out: the counter below the CPU's, and the meter of peak and time above it."""
