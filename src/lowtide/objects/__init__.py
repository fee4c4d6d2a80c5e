"""What Python objects hold: walked, described by keys, and taken apart into tensors."""
