"""Search over compute sequences: annealing, and an exact search for small graphs."""
