"""In-place writes into views of views, without copies of the outer levels.

A functional program writes into ``x[i][:, j]`` from the inside out: it copies the slice with the new part, and then the
tensor with the new slice. This module replaces each such sequence by one operator that puts the innermost part into the
tensor. If the tensor is not used afterwards, it is overwritten in place (``program.overwrites``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from lowtide.capture.convert.builder import meta_of
from lowtide.capture.trace.sizes import SYMBOLIC, expression
from lowtide.program.overwrites import SLICES, fills_its_storage

_ATEN = torch.ops.aten
_WHOLE_VIEWS = {  # views with all elements of the tensor
    _ATEN.alias.default, _ATEN.detach.default, _ATEN.permute.default, _ATEN.squeeze.default, _ATEN.squeeze.dim,
    _ATEN.squeeze.dims, _ATEN.t.default, _ATEN.transpose.int, _ATEN.unsqueeze.default, _ATEN.view.default,
}  # fmt: skip
_PART_VIEWS = {_ATEN.as_strided.default, _ATEN.select.int, _ATEN.slice.Tensor}

Layout = tuple[Any, ...]  # sizes, strides and offset, in elements


def merge_nested_writes(module: fx.GraphModule) -> None:
    """Replace nested writes into views by single writes of the innermost part; changes the joint graph."""
    for node in [*module.graph.nodes]:
        merged = _merged(node) if node.target in SLICES and not node.kwargs else None
        if merged is None:
            continue
        target, args = merged
        with module.graph.inserting_before(node):
            new = module.graph.call_function(target)
        new.args = args  # with sizes as they are
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        module.graph.erase_node(node)


def _merged(node: fx.Node) -> tuple[Any, tuple[Any, ...]] | None:
    """The operator and arguments of one write that does the same as this write and those before it, if there are
    such."""
    base, source, *slices = node.args
    if _is_given(base):
        return None
    whole = base.meta["val"]  # type: ignore[union-attr]
    if not fills_its_storage(meta_of(whole)) or not _same(_layout(whole), _layout(node.meta["val"])):
        return None
    part = SLICES[node.target](whole, *map(_number, slices))
    found = None
    while inner := _written_before(base, source, whole, part):
        written, source, part = inner
        into = _layout(written.args[0].meta["val"])
        found = (
            (written.target, (base, *written.args[1:]))
            if _same(into, _layout(whole))
            else (_ATEN.as_strided_scatter.default, (base, source, *map(_listed, _layout(part))))
        )
    return found


def _written_before(base: Any, source: Any, whole: torch.Tensor, part: torch.Tensor) -> Any:
    """The write into a view of ``base`` that made ``source``, which is to be put at ``part``: the node, what it wrote,
    and where. ``None`` if there is none."""
    views = []
    while isinstance(source, fx.Node) and source.target in _WHOLE_VIEWS:
        views.append(source)
        source = source.args[0]
    if not isinstance(source, fx.Node) or source.target not in SLICES or source.kwargs:
        return None
    into, written, *slices = source.args
    if _root(into) is not _root(base):
        return None
    try:
        place = whole.as_strided(*_layout(into.meta["val"]))  # type: ignore[union-attr]
        seen = place
        for view in reversed(views):
            seen = view.target(seen, *view.args[1:], **view.kwargs)  # type: ignore[operator]
    except RuntimeError:  # such a view does not exist
        return None
    there = SLICES[source.target](place, *map(_number, slices))
    return (source, written, there) if _same(_layout(seen), _layout(part)) else None


def _root(node: Any) -> Any:
    """The tensor that a node is a view of."""
    while isinstance(node, fx.Node) and node.target in _WHOLE_VIEWS | _PART_VIEWS:
        node = node.args[0]
    return node


def _is_given(node: Any) -> bool:
    """Whether the node is an input, whose position in memory may differ between calls, or a copy of one with a write,
    which has the same layout."""
    root = _root(node)
    while root.target in SLICES:
        root = _root(root.args[0])
    return bool(root.op == "placeholder")


def _number(value: Any) -> Any:
    """The size that a node computes, if it computes one."""
    return value.meta["val"] if isinstance(value, fx.Node) else value


def _layout(tensor: torch.Tensor) -> Layout:
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset()


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _same(one: Layout, other: Layout) -> bool:
    """Whether both are equal for all values of the symbolic sizes."""
    pairs = zip(_numbers(one), _numbers(other), strict=True)
    return all(
        expression(a) == expression(b) if isinstance(a, SYMBOLIC) or isinstance(b, SYMBOLIC) else a == b
        for a, b in pairs
    )


def _numbers(layout: Layout) -> Iterator[Any]:
    for value in layout:
        yield from value if isinstance(value, tuple) else (value,)
