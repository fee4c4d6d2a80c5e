"""Trace the joint graph of a function of tensors: forward and backward pass, functional, in ATen operators.

The function runs once. Its inputs are functional tensors, so that in-place operators become functional ones, over fake
tensors, whose operators a tracer records. Then PyTorch's engine differentiates the outputs, and the same tracer goes on.
The operators are eager's; none is decomposed.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import fx
from torch._functorch import config as functorch_config
from torch._higher_order_ops import effects
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode, disable_functional_mode
from torch.autograd.graph import get_gradient_edge
from torch.fx import _lazy_graph_module, _symbolic_trace
from torch.fx.experimental import proxy_tensor

from lowtide.capture.trace import collectives
from lowtide.capture.trace.classes import fake_of
from lowtide.capture.trace.direct import as_it_is, of_constants, resized
from lowtide.capture.trace.expected import as_expected
from lowtide.capture.trace.inplace import keeping_layouts
from lowtide.capture.trace.lifted import LIFT, note_lifted
from lowtide.capture.trace.patches import replaced, wrapped
from lowtide.capture.trace.recorder import recording
from lowtide.capture.trace.sizes import hints
from lowtide.capture.trace.twins import through_twins
from lowtide.capture.trace.writes import (
    UNSEEN,
    refuse_late,
    refuse_reshaped,
    refuse_seen,
    refuse_shared,
    refuse_unregistered,
)
from lowtide.capture.trace.written_out import written_out
from lowtide.device import plain_types
from lowtide.program.foreign import is_foreign
from lowtide.program.layouts import is_dense, memory_of
from lowtide.program.results import below
from lowtide.program.roles import Gradient, Input, Output, Tangent, Written

Function = Callable[..., Sequence[torch.Tensor]]


def _or_foreign(is_impure: Callable[..., bool]) -> Callable[..., bool]:
    """Extend the tracer's test for nodes that stay although nothing reads their results: foreign operators stay too, until
    they have been tried."""
    return lambda node, *args, **kwargs: is_foreign(node.target) or is_impure(node, *args, **kwargs)


# Each takes a functional mode and a call, and returns ``NotImplemented`` if it does not apply.
_RULES = (as_expected, collectives.refuse_others, through_twins, keeping_layouts, resized, as_it_is)


def _by_rules(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """``FunctionalTensorMode.__torch_dispatch__`` for calls to which no rule applies."""

    def run(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for rule in _RULES:
            result = rule(mode, func, args, kwargs or {})
            if result is not NotImplemented:
                return result
        result = dispatch(mode, func, types, args, kwargs)
        if func is LIFT:
            note_lifted(mode, args[0], result)
        return of_constants(mode, func, result)

    return run


@contextlib.contextmanager
def as_traced() -> Iterator[None]:
    """A context for tracing: operators are eager's, in-place ones keep layouts, collectives are functional, random
    operators leave the caller's generator alone, the profiler records no ranges, and distributions do not check the
    values of their arguments."""
    with contextlib.ExitStack() as stack:
        if hasattr(effects, "has_effects"):
            # Checks (of a factorisation, say) stay plain operators instead of being threaded through effect tokens.
            stack.enter_context(replaced(effects, "has_effects", lambda *_: False))
        if hasattr(functorch_config, "decompose_custom_triton_ops"):
            # Operators made of Triton's kernels stay operators.
            stack.enter_context(functorch_config.patch(decompose_custom_triton_ops=False))
        stack.enter_context(wrapped(torch.fx.Node, "is_impure", _or_foreign))
        stack.enter_context(wrapped(FunctionalTensorMode, "__torch_dispatch__", _by_rules))
        stack.enter_context(collectives.functional())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        ranges = torch.autograd.profiler.record_function
        stack.enter_context(replaced(ranges, "__enter__", lambda self: self))
        stack.enter_context(replaced(ranges, "__exit__", lambda self, *error: None))
        stack.enter_context(replaced(torch.distributions.Distribution, "_validate_args", False))
        yield


@contextlib.contextmanager
def _unused_left_out() -> Iterator[None]:
    """A context without work whose results nothing reads: code for graphs, tensor metadata besides ``val``, and records of
    PyTorch's functions and of operators' arguments."""
    others = {
        "_extract_tensor_metadata": lambda *_: None,
        "TorchFunctionMetadataMode": contextlib.nullcontext,
        "_should_save_eager_input_vals": lambda *_: False,
    }
    with contextlib.ExitStack() as stack:
        if hasattr(_lazy_graph_module, "_use_lazy_graph_module"):
            stack.enter_context(_lazy_graph_module._use_lazy_graph_module(True))
        for name, other in others.items():
            if hasattr(proxy_tensor, name):
                stack.enter_context(replaced(proxy_tensor, name, other))
        yield


@contextlib.contextmanager
def _modules_left_alone() -> Iterator[contextlib.ExitStack]:
    """A context in which torch.fx tracers do not replace methods of ``nn.Module``, until the given stack is closed. A tracer
    of operators does not need that, and each replacement makes Python visit all subclasses of ``nn.Module``, thousands
    if libraries of models are imported."""
    with contextlib.ExitStack() as stack:
        if hasattr(_symbolic_trace._Patcher, "patch_method"):
            stack.enter_context(wrapped(_symbolic_trace._Patcher, "patch_method", lambda _: lambda *_, **__: None))
        yield stack


def export_joint(function: Function, fakes: Sequence[torch.Tensor], mode: FakeTensorMode) -> fx.GraphModule:
    """The joint graph of ``function`` of fake tensors of a ``mode``. ``meta["role"]`` says what each placeholder is, and what
    the output node returns: what was written into inputs, the outputs, and a gradient (or ``None``) per input."""
    with contextlib.ExitStack() as stack, as_traced():
        stack.enter_context(fx_traceback.preserve_node_meta())
        stack.enter_context(_unused_left_out())
        stack.enter_context(wrapped(proxy_tensor.ProxyTorchDispatchMode, "__torch_dispatch__", recording))
        stack.enter_context(_alone())
        if mode.shape_env is not None:
            stack.enter_context(written_out())
        stack.enter_context(mode)
        stack.enter_context(FunctionalTensorMode())
        joint, alone = _Joint(function, fakes), stack.enter_context(_modules_left_alone())

        def run(primals: list[torch.Tensor]) -> list[Any]:
            alone.close()  # the function's own code may trace modules
            results = joint.run(primals)
            if mode.shape_env is None:  # else sizes that nobody reads are to go before equal ones become one
                swept.enter_context(wrapped(fx.Graph, "eliminate_dead_code", lambda _: lambda *_, **__: False))
            return results

        with contextlib.ExitStack() as swept:  # below, once
            module = proxy_tensor.make_fx(run, {})(list(fakes))
        joint.describe(module.graph)
        module.graph.eliminate_dead_code()
        refuse_unregistered(module)
        return module


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """A context in which the backward pass runs in this thread, although code that asks is told otherwise, and without the
    user's hooks for saved tensors."""
    before = torch._C._autograd._saved_tensors_hooks_set_tracing(True)
    threads = torch.autograd.is_multithreading_enabled()
    told = wrapped(torch.autograd, "is_multithreading_enabled", lambda _: lambda: threads)
    try:
        with torch.autograd.set_multithreading_enabled(False), told:
            yield
    finally:
        torch._C._autograd._saved_tensors_hooks_set_tracing(before)


class _Joint:
    """Forward and backward pass of a function, to be run by a tracer, and the roles of its inputs and outputs."""

    def __init__(self, function: Function, fakes: Sequence[torch.Tensor]) -> None:
        self.function, self.fakes = function, fakes
        self.tangents: list[tuple[fx.Node, Tangent]] = []
        self.written: list[int] = []
        self.roles: list[Written | Output | Gradient] = []
        self.arrived = Counter[int]()  # the number of terms of each gradient, by input

    def run(self, primals: list[torch.Tensor]) -> list[Any]:
        functionalize = torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)
        with proxy_tensor.maybe_enable_thunkify(), torch._C._ExcludeDispatchKeyGuard(functionalize):
            inputs = [FunctionalTensor.to_functional(primal) for primal in primals]
            outputs = self._forward(inputs)
            after = [one.from_functional() for one in inputs]
            returned = [*(after[number] for number in self.written), *map(fake_of, outputs)]
            gradients = self._backward(inputs, outputs)
            refuse_late(inputs, after)
        final = (Gradient(number, arrived=max(self.arrived[number], 1)) for number in gradients)
        self.roles = [*map(Written, self.written), *map(Output, range(len(outputs))), *final]
        return [*returned, *map(fake_of, gradients.values())]

    def _forward(self, inputs: Sequence[FunctionalTensor]) -> Sequence[torch.Tensor]:
        """Run the function, and record the inputs that it has written into."""
        history = [one.grad_fn for one in inputs]
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            outputs = self.function(*inputs)
        for number, (one, fake, before) in enumerate(zip(inputs, self.fakes, history, strict=True)):
            one.from_functional()  # applies pending writes
            refuse_reshaped(one, fake)
            if torch._functionalize_has_data_mutation(one.elem):  # type: ignore[attr-defined]
                self.written.append(number)
                refuse_seen(one, before)
        refuse_shared(self.fakes, self.written)
        return outputs

    def _backward(
        self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> dict[int, torch.Tensor | None]:
        """Differentiate all outputs that are not just inputs. Returns the gradients by input, in the order in which they are
        complete."""
        given = set(map(memory_of, inputs))
        differentiated = [
            (number, output)
            for number, output in enumerate(outputs)
            if output.requires_grad
            and memory_of(output) not in given
            and (output._base is None or output.grad_fn is not None)
        ]
        wanted = {number: one for number, one in enumerate(inputs) if one.requires_grad}
        tangents = [self._tangent(number, output) for number, output in differentiated]
        found: dict[int, torch.Tensor | None] = {}
        complete: list[int] = []
        if wanted and differentiated:
            sources = [output for _, output in differentiated]
            with contextlib.ExitStack() as stack:
                for kind in plain_types():
                    stack.enter_context(torch.amp.autocast(kind, enabled=False))
                edges = {get_gradient_edge(one)[:2]: number for number, one in wanted.items()}
                stack.enter_context(_told_apart(sources, edges, self.arrived))
                for number, one in wanted.items():
                    hook = one.register_hook(lambda _, number=number: complete.append(number))  # type: ignore[no-untyped-call]
                    stack.callback(hook.remove)
                gradients = torch.autograd.grad(sources, [*wanted.values()], tangents, allow_unused=True)
                found = dict(zip(wanted, gradients, strict=True))
        return {number: found.get(number) for number in (*complete, *range(len(inputs)))}

    def _tangent(self, number: int, output: torch.Tensor) -> torch.Tensor:
        """Make the placeholder of the gradient that arrives for an output."""
        mode = proxy_tensor.get_proxy_mode()
        assert mode is not None
        with proxy_tensor.disable_proxy_modes_tracing(), disable_functional_mode():
            fake = _like(fake_of(output))
        proxy = mode.tracer.create_proxy("placeholder", f"tangents_{len(self.tangents) + 1}", (), {})
        proxy_tensor.track_tensor_tree(fake, proxy, constant=None, tracer=mode.tracer)
        self.tangents.append((proxy.node, Tangent(number)))
        return FunctionalTensor.to_functional(fake)

    def describe(self, graph: fx.Graph) -> None:
        """Move all placeholders to the front, and set the roles of placeholders and outputs."""
        own = [node for node, _ in self.tangents]
        inputs = [node for node in graph.find_nodes(op="placeholder") if node not in own]
        for number, node in enumerate(inputs):
            node.meta["role"] = Input(number)
        for (node, tangent), before in zip(self.tangents, [*inputs[-1:], *own], strict=False):
            node.meta["role"] = tangent
            before.append(node)
        output: Any = graph.output_node()
        output.meta["role"] = self.roles
        for value, role in zip(output.args[0], self.roles, strict=True):
            if isinstance(role, Written) and self.fakes[role.input].requires_grad:
                value.meta[UNSEEN] = True


def _like(output: torch.Tensor) -> torch.Tensor:
    """A fake gradient for an output, with the output's layout if a tensor of its own can have that."""
    overlapping = output.layout is torch.strided and torch._debug_has_internal_overlap(output) == 1
    symbolic = output._has_symbolic_sizes_strides
    if overlapping or (symbolic and not is_dense(hints(output.shape), hints(output.stride()))):
        dense = torch.empty_like(output, memory_format=torch._prims_common.suggest_memory_format(output))
    else:
        dense = torch.empty_strided(output.shape, output.stride(), dtype=output.dtype, device=output.device)
    dense._lowtide_empty = False  # type: ignore[attr-defined]
    gradient = torch.conj(dense) if output.is_conj() else dense
    return torch._neg_view(gradient) if output.is_neg() else gradient


@contextlib.contextmanager
def _told_apart(
    outputs: Sequence[torch.Tensor], edges: Mapping[tuple[Any, int], int], arrived: Counter[int]
) -> Iterator[None]:
    """A context for the backward pass of ``outputs``. Its nodes get ``meta["partitioner_tag"]``, and as ``meta["seq_nr"]``
    the number of the forward nodes that they belong to. Counts in ``arrived`` the gradients that pass along ``edges``."""

    def note(known: Sequence[int | None], gradients: Sequence[torch.Tensor | None], _: Any) -> None:
        fx_traceback.reset_grad_fn_seq_nr()
        pairs = zip(known, gradients, strict=False)
        arrived.update(number for number, one in pairs if number is not None and one is not None)

    for node in below(outputs):
        number = node._sequence_nr()
        node.register_prehook(lambda *_, number=number: fx_traceback.set_grad_fn_seq_nr(number))
        node.register_hook(functools.partial(note, [edges.get(edge) for edge in node.next_functions]))
    fx_traceback.current_meta["partitioner_tag"] = "is_backward"
    try:
        yield
    finally:
        fx_traceback.current_meta.pop("partitioner_tag", None)
