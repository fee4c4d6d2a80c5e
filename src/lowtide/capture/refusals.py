"""What cannot be captured, and the error messages for it."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from lowtide.capture.python_state.effects.held_inputs import holding
from lowtide.capture.python_state.paths import AttributePath, of_modules, tensors_in, texts
from lowtide.capture.trace.writes import WRITTEN_HISTORY, WriteError
from lowtide.capture.traced_model import NO_SAVED_TENSORS_HOOKS
from lowtide.errors import CaptureError, PlanError
from lowtide.program import Program, targets
from lowtide.program.distributed.sharded import GatheredForm, is_sharded
from lowtide.program.layouts import memory_of
from lowtide.program.source import is_user_file

_MEANINGS = {  # explanations of PyTorch's messages
    "data is not allocated yet": "an operator reads the values of a tensor, which there are none of yet (F.ctc_loss does where "
    "lengths are given as lists: pass tensors; recurrent layers do with packed sequences on a GPU, under autocast and with "
    "proj_size: pass padded ones)",
    "use_reentrant=True": NO_SAVED_TENSORS_HOOKS,
}
# PyTorch's message for writes into a tensor that is not an input of the program.
_WRITES = "mutating a non-functional tensor with a functional tensor"


def check(model: nn.Module, tensors: Sequence[torch.Tensor]) -> None:
    """Raise ``CaptureError`` for what can be refused without a trace. ``tensors``: parameters, buffers and tensors of
    the call."""
    devices = {tensor.device for tensor in tensors if tensor.dim() > 0 or tensor.device.type != "cpu"}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise CaptureError(
            f"the model and its inputs lie on {len(devices)} devices ({names}); move them to one device."
        )
    _refuse_sharded_parts(model)
    _refuse_context_parallel()
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise CaptureError(
                f"module {name or type(model).__name__!r} has sparse gradients (sparse=True), which a plan cannot hold. Create "
                "it with sparse=False, or run the model under lowtide.online."
            )
        if isinstance(module, torch.jit.ScriptModule) and [*module.parameters(), *module.buffers()]:
            raise CaptureError(
                f"module {name or type(model).__name__!r} is compiled (torch.jit) and has parameters or buffers, which "
                "compiled code reads where no capture sees it. Use the module that it was compiled from."
            )
        if name and (module._backward_hooks or module._backward_pre_hooks):
            raise CaptureError(
                f"submodule {name!r} has backward hooks, which a planned backward pass cannot call. Put them on the model "
                "itself, use Tensor.register_hook on parameters, or remove them."
            )
    for tensor in tensors:
        if hasattr(tensor, "ds_tensor"):
            raise CaptureError(
                "DeepSpeed has partitioned the parameters (ZeRO stage 3): outside of its hooks they are empty. Use stage 1 or "
                "2, or fully_shard (FSDP2), which is planned together with the model."
            )
        plain = type(tensor) in (torch.Tensor, nn.Parameter, GatheredForm, nn.Buffer, FakeTensor)
        sparse = tensor.layout is torch.sparse_coo and not (tensor.requires_grad or tensor.dense_dim())
        if not plain or not (tensor.layout is torch.strided or sparse) or tensor.is_nested or tensor.is_quantized:
            kind = " nested" if tensor.is_nested else " quantized" if tensor.is_quantized else ""
            raise CaptureError(
                f"a{kind} {type(tensor).__name__} of layout {tensor.layout} cannot be captured; only dense plain tensors can, "
                "and sparse ones in the COO layout that require no gradient."
            )


def _refuse_sharded_parts(model: nn.Module) -> None:
    inner = next((name for name, module in model.named_modules() if name and is_sharded(module)), None)
    if inner is not None and not is_sharded(model):
        raise CaptureError(
            f"submodule {inner!r} is a unit of fully_shard, but the model itself is not: call fully_shard(model) too, "
            "after its blocks, so that the rest of its parameters is sharded as well."
        )


def _refuse_context_parallel() -> None:
    where = str(getattr(functional.scaled_dot_product_attention, "__module__", ""))
    if where.startswith("torch.distributed.tensor.experimental"):
        raise CaptureError(
            "inside of context_parallel (torch.distributed.tensor.experimental) attention is distributed by functions that a "
            "plan does not know. Run such a model without a plan, or shard it otherwise (fully_shard, parallelize_module)."
        )


def capture_error(error: Exception) -> CaptureError:
    """An error of the trace with an explanation, and the user's line."""
    source = ""
    frame = error.__traceback__
    while frame is not None:
        if is_user_file(frame.tb_frame.f_code.co_filename):
            source = f"{frame.tb_frame.f_code.co_filename}:{frame.tb_lineno}"
        frame = frame.tb_next
    place = f" at {source}" if source else ""
    if isinstance(error, WriteError) or _WRITES in str(error):
        return CaptureError(
            f"the forward pass writes in place{place} into a tensor that is no parameter, no buffer and in no attribute "
            "of the model, which a plan cannot follow. Register it: self.register_buffer(name, tensor).",
            source=source,
        )
    summary = str(error).strip().split("\n")[0].rstrip(".")
    if "fake impl" in summary:
        return CaptureError(
            f"an operator{place} has no fake implementation, which tells what its results look like: register one "
            f"(torch.library.register_fake), or run the model under lowtide.online ({summary}).",
            source=source,
        )
    summary = next((meaning for text, meaning in _MEANINGS.items() if text in summary), summary)
    return CaptureError(
        f"the program cannot be captured as one graph{place}: {type(error).__name__}: {summary}. Where model(*args, **kwargs) "
        "fails alone too, correct the model or the sample; where the program depends on the data, run it under lowtide.online.",
        source=source,
    )


def refuse_spent(objects: Sequence[Any]) -> None:
    """Raise ``CaptureError`` for arguments that give their contents only once (iterators): the capture would use them
    up."""
    spent = next((one for one in objects if isinstance(one, (Iterator, queue.Queue, queue.SimpleQueue))), None)
    if spent is not None:
        raise CaptureError(
            f"there is a {type(spent).__name__} among the arguments, which gives what it holds only once, to the capture then. "
            "Give the model a list (list(...)), or run it under lowtide.online."
        )


def written_inputs(program: Program, inputs: Sequence[torch.Tensor]) -> frozenset[int]:
    """The flat inputs that the program writes into. Raises ``CaptureError`` if a constant shares their memory."""
    calls = zip(program.graph.ops, program.calls, strict=True)
    values = {op.inputs[0] for op, call in calls if call.target is targets.update}
    written = frozenset(place for place, value in enumerate(program.inputs) if value in values)
    if any(inputs[place].requires_grad and not inputs[place].is_leaf for place in written):
        raise CaptureError(WRITTEN_HISTORY)
    memory = {memory_of(inputs[place]) for place in written}
    if any(memory_of(constant) in memory for constant in program.constants.values()):
        raise CaptureError(
            "the forward pass writes into a buffer or an argument, and reads the same memory by a variable (a global one that "
            "holds the model, say), where a plan would find what was there before. Read it through the model, or run it under "
            "lowtide.online."
        )
    return written


def written_attributes(model: nn.Module, error: Exception) -> frozenset[AttributePath]:
    """The attributes whose tensors the forward pass writes into."""
    if isinstance(error, WriteError):
        return holding(model, error.tensor)
    if _WRITES in str(error):
        return frozenset(
            place for place, value in of_modules(model) if tensors_in(value)
        )  # the written tensor may be part of one of them
    return frozenset()


def refuse_objects(places: Sequence[AttributePath]) -> None:
    """Raise ``CaptureError`` for attributes in which a call leaves an object that it made, and which later calls may
    read."""
    if places:
        raise CaptureError(
            f"the forward pass puts objects that it makes into attributes ({texts(places)}) which a later call may read, and "
            "planned calls would not make them. Where its first call does so alone, call the model once before it is "
            "rematerialized; otherwise keep tensors or plain values there, or run the model under lowtide.online."
        )


def require_module(model: object, verb: str) -> None:
    """Raise ``PlanError`` unless ``model`` is an ``nn.Module``."""
    if not isinstance(model, nn.Module):
        given = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise PlanError(f"{verb} takes a torch.nn.Module, not {given}.")
    if isinstance(model, torch.jit.ScriptModule):
        raise PlanError(
            f"{verb} takes the module that a {type(model).__name__} was compiled from (torch.jit): what compiled code reads is "
            "not seen."
        )
    if isinstance(model, OptimizedModule):
        raise PlanError(
            f"{verb} takes the model that torch.compile was given, which is the attribute _orig_mod of what it returned: "
            "torch.compile(model), of a model that is rematerialized, runs by its plan; "
            'torch.compile(model, backend="lowtide") plans compiled graphs.'
        )
