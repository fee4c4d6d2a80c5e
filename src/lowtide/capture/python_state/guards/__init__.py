"""What Python code reads while a program is captured, and whether it is still the same before a planned call."""
