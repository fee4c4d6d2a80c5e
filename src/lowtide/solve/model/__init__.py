"""The graph as arrays, its structure, and the operations on compute sequences that all planners share."""
