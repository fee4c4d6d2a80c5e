"""Tensors of several ranks in a program: parts of them, and the collectives that bring them together."""
