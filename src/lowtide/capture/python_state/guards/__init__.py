"""Record what Python code reads during capture, and check before a planned call that it is unchanged."""
