"""One run of the forward pass for what takes AOTAutograd two.

It runs a function for what it says of inputs and outputs (what is written to, which output is a view of what, which gradients
will arrive), and again for the graph. Here the graph is traced first, as that of a function without results; once the forward
pass has ended, the same analysis looks at what it left, and the gradients that will arrive become inputs of the graph. Where
the analysis would have had the forward pass run in another way, it says ``NotInOnePass``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._functorch import aot_autograd
from torch._functorch._aot_autograd import collect_metadata_analysis, graph_capture
from torch._functorch._aot_autograd.functional_utils import has_data_mutation, sync_functional_tensor, to_fun
from torch.fx.experimental import proxy_tensor
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.capture.trace.fake import QUESTIONS
from lowtide.capture.trace.patches import replaced, wrapped

_NEEDED = (
    (aot_autograd, "run_functionalized_fw_and_collect_metadata"),
    (aot_autograd, "create_aot_state"),
    (graph_capture, "create_joint"),
    (collect_metadata_analysis, "to_fun"),
)


class NotInOnePass(Exception):
    """The function must be traced in two passes."""


class OnePass:
    """A trace of a function of ``fakes`` in one pass, inside ``active()``. The function says what it ``returned``."""

    def __init__(self, fakes: Sequence[torch.Tensor]) -> None:
        self._fakes = list(fakes)
        self._metadata: Any = None  # of a function without results, until that is known
        self._options: dict[str, Any] = {}
        self._tangents: list[Any] = []

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        if not all(hasattr(module, name) for module, name in _NEEDED):
            raise NotInOnePass
        self._collect = getattr(*_NEEDED[0])
        with contextlib.ExitStack() as stack:
            stack.enter_context(replaced(*_NEEDED[0], self._without_results))
            stack.enter_context(wrapped(*_NEEDED[1], self._with_gradients))
            stack.enter_context(wrapped(*_NEEDED[2], self._with_tangents))
            stack.enter_context(wrapped(proxy_tensor.ProxyTorchDispatchMode, "__torch_dispatch__", _asking))
            yield
        if any(map(has_data_mutation, self._tangents)):
            raise NotInOnePass

    def _without_results(self, _: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        self._options = options

        def collected(*args: Any) -> Any:
            self._metadata = self._collect(lambda *_: [], **options)(*args)
            return self._metadata

        return collected

    def _with_gradients(self, create: Callable[..., Any]) -> Callable[..., Any]:
        def created(*args: Any) -> Any:
            state = create(*args)
            state.needs_autograd = True
            return state

        return created

    def _with_tangents(self, create: Callable[..., Any]) -> Callable[..., Any]:
        def created(*args: Any, **kwargs: Any) -> Any:
            joint = create(*args, **kwargs)

            def noting(primals: list[Any], tangents: list[Any]) -> Any:
                self._tangents = tangents
                return joint(primals, tangents)

            noting.handle = joint.handle  # type: ignore[attr-defined]
            return noting

        return created

    def returned(self, primals: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
        """The forward pass has ended: from here on the trace is that of a function that returns these."""
        mode = proxy_tensor.get_proxy_mode()
        if mode is None:
            raise NotInOnePass
        graph: torch.fx.Graph = mode.tracer.graph
        last = next(iter(reversed(graph.nodes)))
        for result in results:
            sync_functional_tensor(result)
        if next(iter(reversed(graph.nodes))) is not last:  # views that the tracer makes at the end
            raise NotInOnePass
        for primal in primals:
            sync_functional_tensor(primal)
        functional = {id(fake): primal for fake, primal in zip(self._fakes, primals, strict=True)}
        with (
            proxy_tensor.disable_proxy_modes_tracing(),
            replaced(*_NEEDED[3], lambda fake: functional[id(fake)]),
        ):
            found = self._collect(lambda *_: list(results), **self._options)(*self._fakes)
        if not self._holds(found):
            raise NotInOnePass
        tangents, descriptions = self._metadata.traced_tangents, self._metadata.traced_tangents_descs
        tangents += _in_other_memory(found.traced_tangents)  # these lists are what the tracer has already
        descriptions += found.traced_tangents_descs
        vars(self._metadata).update(vars(found), traced_tangents=tangents, traced_tangents_descs=descriptions)
        for number, tangent in enumerate(tangents):
            _placeholder(mode.tracer, f"tangents_{number + 1}", tangent)
            self._tangents.append(to_fun(tangent))

    def _holds(self, found: Any) -> bool:
        """Whether nothing of it would have changed how the forward pass is run."""
        written = [info for info in found.input_info if info.mutates_data]
        storages = {fake.untyped_storage()._cdata for fake in self._fakes}
        if written and (len(storages) < len(self._fakes) or any(info.requires_grad for info in written)):
            return False
        if any(info.mutates_metadata or info.mutates_storage_metadata for info in found.input_info):
            return False
        return bool(found.traced_tangents) and not found.num_intermediate_bases and not found.tokens


def _in_other_memory(tensors: Sequence[Any]) -> list[torch.Tensor]:
    """The same layouts, in memory that only these share: the gradient of a result is not in the memory of that."""
    memories: dict[Any, torch.Tensor] = {}
    made = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        key = storage._cdata, tensor.dtype
        with _disable_current_modes(), tensor.fake_mode:
            if key not in memories:
                elements = storage.nbytes() // tensor.dtype.itemsize
                memories[key] = torch.empty(elements, dtype=tensor.dtype, device=tensor.device)
            made.append(memories[key].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()))
    return made


def _placeholder(tracer: Any, name: str, tensor: torch.Tensor) -> None:
    """Another input of the graph behind those that it has."""
    *_, last = (node for node in tracer.graph.nodes if node.op == "placeholder")
    with tracer.graph.inserting_after(last):
        proxy = tracer.create_proxy("placeholder", name, (), {})
    proxy.node.meta.clear()
    with proxy_tensor.disable_proxy_modes_tracing():
        proxy_tensor.track_tensor_tree(tensor, proxy, constant=None, tracer=tracer)


def _asking(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """``ProxyTorchDispatchMode.__torch_dispatch__``, which may answer a question by itself, so that the fake mode hears it."""

    def run(mode: Any, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func in QUESTIONS:
            with proxy_tensor.disable_proxy_modes_tracing():
                func(*args, **(kwargs or {}))
        return dispatch(mode, func, types, args, kwargs or {})

    return run
