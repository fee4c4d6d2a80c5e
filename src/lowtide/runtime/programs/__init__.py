"""The planned programs of a module, by the signature of its calls: how they are found, made, kept and improved."""
