"""The graph as arrays, its structure, and what every planner does with sequences of computes."""
