"""Distributed tensors in a program: their local parts, and the collectives that combine them."""
