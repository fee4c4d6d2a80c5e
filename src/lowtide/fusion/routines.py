"""Faster routines for ATen operators on float32 tensors on the CPU: matrix products and attention.

A routine takes the operator's arguments and returns its results in the same layouts, equal except for rounding. ATen
multiplies with the BLAS library that PyTorch was built with. If that has no kernels for this processor, oneDNN takes
half the time. A convolution with a kernel of one element is a matrix product per image. Attention is slow for heads
narrower than a vector register, so such heads are padded with zeros.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from lowtide.fusion.comparison import checking, require_same
from lowtide.fusion.kinds import operator_name
from lowtide.program.layouts import contiguous_strides, is_expanded
from lowtide.program.precision import matmul_precision
from lowtide.program.program import Call, Program, Ref, TensorMeta

_FEWEST_ROWS = 32  # least rows of a part that are worth a call
_WIDE = 16  # floats in the widest vector register


class Routine:
    """A callable with the arguments of ``operator``."""

    def __init__(self, operator: Callable[..., Any], compute: Callable[..., Any], name: str) -> None:
        self.operator = operator
        self.compute = compute
        self.__name__ = name
        self.__qualname__ = name  # key of its cached costs

    def __call__(self, *args: Any) -> Any:
        result = self.compute(*args)
        if checking():
            require_same(self.__name__, (str(self.operator),), self.operator(*args), result)
        return result


def routines(program: Program, op_id: int, spare_bytes: int) -> list[Routine]:
    """Routines for the call of ``op_id``. Routines that work in parts take about ``spare_bytes`` beside operands and
    results."""
    call, op = program.calls[op_id], program.graph.ops[op_id]
    metas = [program.metas[value] for value in (*op.inputs, *op.outputs)]
    if call.kwargs or not all(_usual(meta) for meta in metas):
        return []
    arguments = [program.metas[a.value] if isinstance(a, Ref) else a for a in call.args]
    found = _ways_to_compute(operator_name(call.target), arguments, spare_bytes)
    return [Routine(call.target, compute, name) for name, compute in found]


def _usual(meta: TensorMeta) -> bool:
    """Whether a tensor is float32, on the CPU, not empty, and without elements that share memory."""
    if meta.entries is not None:
        return False
    expanded = is_expanded(meta.shape, meta.stride)
    return meta.dtype == torch.float32 and meta.device.type == "cpu" and all(meta.shape) and not expanded


def _ways_to_compute(
    operator: str, arguments: Sequence[Any], spare_bytes: int
) -> Iterator[tuple[str, Callable[..., Any]]]:
    match operator, arguments:
        case "mm", [left, right]:
            yield "onednn_mm", _mm
            # An operand that is not row-major is copied; in parts if the whole copy would take too much.
            a_row = 4 * (left.shape[1] + max(left.shape[1], right.shape[1]))  # two copies, or a copy and its product
            rows = spare_bytes // a_row // _FEWEST_ROWS * _FEWEST_ROWS
            if left.stride[1] != 1 and _FEWEST_ROWS <= rows < left.shape[0]:
                yield f"onednn_mm_by_{rows}", functools.partial(_mm_in_parts, rows)
        case "addmm", [bias, _, right] if bias.shape == right.shape[1:]:
            yield "onednn_addmm", _addmm
        case "convolution", [images, weight, _, *geometry] if _is_product(images, weight, geometry):
            yield "onednn_convolution", _convolution
        case "convolution_backward", [gradient, images, weight, _, *geometry, _]:
            if _is_product(images, weight, geometry) and _is_contiguous(gradient):
                yield "onednn_convolution_backward", _convolution_backward
        case "_scaled_dot_product_flash_attention_for_cpu_backward", [_, query, key, *_, dropout, _]:
            heads, width = query.shape[1], query.shape[-1]
            a_head = 4 * _WIDE * 4 * (query.shape[2] + key.shape[2])  # 5 operands and 3 results: 4 like each
            room = spare_bytes // a_head
            if width < _WIDE and room and not dropout:
                at_once = -(-heads // -(-heads // room))  # as few parts as fit, of similar size
                yield f"wide_attention_backward_by_{at_once}", functools.partial(_attention_backward, at_once)


def _is_product(images: TensorMeta, weight: TensorMeta, geometry: Sequence[Any]) -> bool:
    """Whether each image's result is the weight matrix times the image."""
    stride, padding, _, transposed, _, groups = geometry
    small = all(size == 1 for size in (*weight.shape[2:], *stride)) and not any(padding)
    return small and not transposed and groups == 1 and _is_contiguous(images) and _is_contiguous(weight)


def _is_contiguous(meta: TensorMeta) -> bool:
    return meta.stride == contiguous_strides(meta.shape)


def is_available() -> bool:
    """Whether PyTorch has oneDNN enabled, and neither another precision nor determinism was requested."""
    return bool(
        torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and torch.backends.mkldnn.enabled
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and matmul_precision() == "highest"
        and not torch.are_deterministic_algorithms_enabled()
    )


def _linear(left: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``left`` times the transpose of ``weight``."""
    return torch.ops.mkldnn._linear_pointwise.default(left, weight, bias, "none", [], "")  # type: ignore[no-any-return]


def _mm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return _linear(left, right.t())


def _addmm(bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return _linear(left, right.t(), bias)


def _mm_in_parts(rows: int, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    result = left.new_empty(left.shape[0], right.shape[1])
    weight = right.t()
    for start in range(0, left.shape[0], rows):
        # Two copies, one in memory order and one transposing, take a quarter of the time of transposing a slice.
        part = left[start : start + rows].t().contiguous().t().contiguous()
        result[start : start + rows] = _linear(part, weight)
    return result


def _convolution(images: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *geometry: Any) -> torch.Tensor:
    result = images.new_empty(images.shape[0], weight.shape[0], *images.shape[2:])
    matrix = weight.flatten(1)
    for image, out in zip(images.flatten(2), result.flatten(2), strict=True):
        product = _linear(matrix, image.t())
        out.copy_(product if bias is None else product.add_(bias[:, None]))
    return result


def _convolution_backward(
    gradient: torch.Tensor, images: torch.Tensor, weight: torch.Tensor, *geometry_and_mask: Any
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    of_images, of_weight, of_bias = geometry_and_mask[-1]
    back = weight.flatten(1).t().contiguous()
    images_gradient = torch.empty_like(images) if of_images else None
    weight_gradient = None
    for index, (part, image) in enumerate(zip(gradient.flatten(2), images.flatten(2), strict=True)):
        if images_gradient is not None:
            images_gradient[index].flatten(1).copy_(_linear(back, part.t()))
        if of_weight:
            product = _linear(part, image)
            weight_gradient = product if weight_gradient is None else weight_gradient.add_(product)
    return (
        images_gradient,
        None if weight_gradient is None else weight_gradient.view_as(weight),
        gradient.flatten(2).sum((0, 2)) if of_bias else None,
    )


def _attention_backward(at_once: int, *arguments: Any) -> tuple[torch.Tensor, ...]:
    *narrow, logsumexp, dropout, causal = arguments  # the gradient, queries, keys, values, results
    images, heads, _, width = narrow[1].shape
    of_part = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    results = [t.new_empty(images, t.shape[2], heads, width).transpose(1, 2) for t in narrow[1:4]]
    for image in range(images):
        for head in range(0, heads, at_once):
            part = (slice(image, image + 1), slice(head, head + at_once))
            wide = [torch.nn.functional.pad(tensor[part], (0, _WIDE - width)) for tensor in narrow]
            found = of_part(*wide, logsumexp[part], dropout, causal, scale=width**-0.5)
            for result, gradients in zip(results, found, strict=True):
                result[part] = gradients[..., :width]
            del wide, found, gradients  # free them before the next part
    return tuple(results)


def stands_for(call: Call) -> Callable[..., Any]:
    """The ATen operator that a call computes."""
    return call.target.operator if isinstance(call.target, Routine) else call.target
