"""From a program of ATen operators to one of fused kernels: what a compiler makes of pointwise and reduction chains.

The result is a program like any other: its kernels are measured, planned, simulated and run as single operators are.
"""

from lowtide.fusion.autotune import autotuned
from lowtide.fusion.comparison import checked
from lowtide.fusion.kernel import Kernel
from lowtide.fusion.norms import split_norms
from lowtide.fusion.rewrite import fuse, rewrite

__all__ = ["Kernel", "autotuned", "checked", "fuse", "rewrite", "split_norms"]
