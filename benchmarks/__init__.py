"""Benchmarks and sweeps: committed commands that produce the figures of the README and of ``benchmarks/results``."""
