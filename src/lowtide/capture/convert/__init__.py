"""Converting: from the traced joint graph to the tensor program."""
