"""The tensor program: operators, the calls that run them, layouts of values, references between them."""

from lowtide.program.program import Call, Program, Ref, TensorMeta
from lowtide.program.results import Result

__all__ = ["Call", "Program", "Ref", "Result", "TensorMeta"]
