"""What code may do, told by the names in it and by where it comes from."""
