"""Run planned programs in place of a module's ``forward``, with one plan per signature of its calls."""
