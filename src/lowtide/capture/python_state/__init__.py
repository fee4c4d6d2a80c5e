"""The Python state of a call: what the model's code reads, writes and draws beside tensors."""
