"""What Python code changes in a call, so that a planned call changes it too."""
