"""Running a planned program: the model swap, one plan per input signature."""
