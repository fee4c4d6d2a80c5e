"""One call of a planned program, from its forward pass to the end of its backward pass."""
