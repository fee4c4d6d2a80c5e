"""The one place that calls AOTAutograd's private entry point for the joint graph.

Tracing runs without the Python dispatcher: it would replace operators by decompositions that eager does not use
(dropout, bilinear upsampling, LSTM layers), and only symbolic shapes need it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import nn
from torch._functorch import aot_autograd
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd import graph_capture
from torch._higher_order_ops import effects
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx import _lazy_graph_module
from torch.fx.experimental import proxy_tensor

from lowtide.capture.trace import collectives
from lowtide.capture.trace.expected import expecting
from lowtide.capture.trace.inplace import keeping_layouts
from lowtide.capture.trace.patches import replaced, wrapped
from lowtide.capture.trace.twins import through_twins
from lowtide.errors import CaptureError
from lowtide.program.foreign import is_foreign


class _Function(nn.Module):
    """A function of tensors in the form the entry point takes."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = [function]

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self._function[0](*tensors)


@contextlib.contextmanager
def _eager_dispatch() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for module in (aot_autograd, graph_capture):
            if hasattr(module, "enable_python_dispatcher"):
                stack.enter_context(replaced(module, "enable_python_dispatcher", contextlib.nullcontext))
        if hasattr(effects, "has_effects"):
            # Checks (of a factorisation, say) stay plain operators instead of being threaded through effect tokens.
            stack.enter_context(replaced(effects, "has_effects", lambda *_: False))
        # Operators made of Triton's kernels stay operators.
        for setting, value in (("backward_pass_autocast", "off"), ("decompose_custom_triton_ops", False)):
            if hasattr(functorch_config, setting):
                stack.enter_context(functorch_config.patch({setting: value}))
        yield


def _or_foreign(is_impure: Callable[..., bool]) -> Callable[..., bool]:
    """The tracer's test of what stays although nobody reads its result: foreign operators, until they have been tried."""
    return lambda node, *args, **kwargs: is_foreign(node.target) or is_impure(node, *args, **kwargs)


@contextlib.contextmanager
def as_traced() -> Iterator[None]:
    """Inside, operators are eager's and in-place ones keep layouts, collectives are functional, random operators leave the
    caller's generator as it is, the profiler's ranges are none, and distributions do not look at the values of arguments."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_eager_dispatch())
        stack.enter_context(wrapped(torch.fx.Node, "is_impure", _or_foreign))
        for replacing in (keeping_layouts, through_twins, collectives.refusing, expecting):
            stack.enter_context(wrapped(FunctionalTensorMode, "__torch_dispatch__", replacing))
        stack.enter_context(collectives.functional())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        ranges = torch.autograd.profiler.record_function
        stack.enter_context(replaced(ranges, "__enter__", lambda self: self))
        stack.enter_context(replaced(ranges, "__exit__", lambda self, *error: None))
        stack.enter_context(replaced(torch.distributions.Distribution, "_validate_args", False))
        yield


@contextlib.contextmanager
def _unused_left_out() -> Iterator[None]:
    """Inside, no code is generated for graphs, and no second description of tensors beside ``val`` noted: nobody reads them."""
    with contextlib.ExitStack() as stack:
        if hasattr(_lazy_graph_module, "_use_lazy_graph_module"):
            stack.enter_context(_lazy_graph_module._use_lazy_graph_module(True))
        if hasattr(proxy_tensor, "_extract_tensor_metadata"):
            stack.enter_context(replaced(proxy_tensor, "_extract_tensor_metadata", lambda *_: None))
        yield


def export_joint(function: Callable[..., Any], fakes: Sequence[torch.Tensor]) -> tuple[torch.fx.GraphModule, Any]:
    """The joint forward and backward graph of ``function`` at ATen level, functional, without decompositions, and
    AOTAutograd's metadata about inputs and outputs."""
    if not hasattr(aot_autograd, "aot_export_joint_with_descriptors"):
        raise CaptureError(
            f"torch {torch.__version__} lacks aot_export_joint_with_descriptors; lowtide supports torch 2.11 and later."
        )
    module = _Function(function)
    with contextlib.ExitStack() as stack, as_traced():
        stack.enter_context(fx_traceback.preserve_node_meta())
        stack.enter_context(_unused_left_out())
        joint = aot_autograd.aot_export_joint_with_descriptors(stack, module, tuple(fakes), decompositions={})
        return joint.graph_module, joint._aot_state.fw_metadata
