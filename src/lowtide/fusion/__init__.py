"""Turn a program of ATen operators into one with compiled kernels for chains of pointwise operators and reductions.

The result is a program like any other: kernels are measured, planned, simulated and run as single operators.
"""

from lowtide.fusion.autotune import autotuned
from lowtide.fusion.comparison import checked
from lowtide.fusion.kernel import Kernel
from lowtide.fusion.norms import split_norms
from lowtide.fusion.rewrite import fuse, rewrite

__all__ = ["Kernel", "autotuned", "checked", "fuse", "rewrite", "split_norms"]
