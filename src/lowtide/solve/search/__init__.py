"""Search over compute sequences: local search by annealing, exact search on tiny graphs."""
