"""The planned programs of a module by signature of its calls: how they are found, made, kept and improved."""
