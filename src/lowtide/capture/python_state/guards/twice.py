"""Refuse objects that a forward pass reaches twice in ways a trace cannot follow: once in the traced copy of the model, and
once uncopied, through a variable or an argument. A write through one is not seen through the other. Without writes both are
equivalent, except for code that compares identities, such as hooks that look up the module they are called for."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from lowtide.capture.python_state.guards.reads import Content, Contents, Reads, identical
from lowtide.capture.python_state.paths import named
from lowtide.errors import CaptureError
from lowtide.objects.walk import OWN, PLAIN, content, fields
from lowtide.program.distributed.sharded import is_sharded

_NOT_PLAIN = OWN | {"forward"}
_DEPTH = 8
_KEYED = (dict, set, frozenset)  # look items up by hash and equality


def refuse_writes(
    seen: Mapping[int, Any],
    copies: Mapping[int, tuple[Any, Any]],
    tensors: Mapping[int, torch.Tensor],
    written: Collection[tuple[int, str]],
    contents: Mapping[int, Content],
) -> None:
    """Raise ``CaptureError`` if a run wrote into an object that it reached twice. ``seen``: by id of each object that the run
    reached, the user's original. ``copies``, ``tensors``: originals of objects and tensors in the model's copy, by the copy's
    id. ``written``: attributes written, as (object id, name). ``contents``: of holders before the run."""
    changed = {key for key, _ in written}
    names = []
    for original, copied in copies.values():
        if seen.get(id(original)) is not original or id(copied) not in seen or original is copied:
            continue
        if is_sharded(original):  # FSDP2's hooks refer to it; its copy is that of the plain module
            continue
        if (
            id(original) in changed
            or _is_touched(original, contents)
            or not _mirrors(original, copied, copies, tensors)
        ):
            names.append(type(original).__name__)
    if names:
        raise CaptureError(
            f"the forward pass comes to an object ({named(names)}) both through the model and by a variable or an argument, "
            "and writes into it, which no trace of a copy of the model can follow. Use one of both ways, or run the model "
            "under lowtide.online."
        )


def _is_touched(original: Any, contents: Mapping[int, Content]) -> bool:
    """Whether the content of a holder has changed. Compares by value too, since an array's content is created at each read."""
    items, held = content(original) or (), contents.get(id(original))
    if held is None or identical(items, held.items):
        return False
    known = Contents({**contents})
    pairs = zip(held.items, items, strict=False)
    return len(items) != len(held.items) or not all(one is now or known.same(one, now) for one, now in pairs)


def refuse_told_apart(
    seen: Mapping[int, Any],
    copies: Mapping[int, tuple[Any, Any]],
    tensors: Mapping[int, torch.Tensor],
    reads: Reads,
    arguments: Mapping[int, Any],
    compares: Collection[str],
) -> None:
    """Raise ``CaptureError`` if code may tell a copy from its original: if a run reached an object of the model also by a
    variable or among the ``arguments``, and its code uses ``is`` (or, for a module, any comparison in ``compares``); or if such
    an object, or one of the ``tensors``, is a key there. ``seen``, ``copies``: as in ``refuse_writes``."""
    copied = {id(one): one for one, copy in copies.values() if not (one is copy or is_sharded(one))}
    outside = {id(one): one for one in (*arguments.values(), *reads.holders)}
    outside = {key: one for key, one in outside.items() if seen.get(key) is one}  # only uncopied ones
    keys = {id(_referent(key)) for one in outside.values() if isinstance(one, _KEYED) for key in one}
    found = [one for one in (*copied.values(), *tensors.values()) if id(one) in keys and _is_told_by_identity(one)]
    if compares:
        holders = [held for held in reads.contents.values() if not isinstance(held.holder, weakref.ReferenceType)]
        named_ones = {*arguments, *(id(read.value) for read in reads.values.values())}
        named_ones |= {id(item) for held in holders for item in held.items}
        twice = [one for key, one in copied.items() if key in named_ones and seen.get(key) is one]
        found += [one for one in twice if "IS_OP" in compares or isinstance(one, nn.Module)]
    if found:
        raise CaptureError(
            f"the forward pass, or a hook in it, comes to a {type(found[0]).__name__} of the model by a variable or an "
            "argument, and may ask which one it is, which a trace of a copy of the model cannot answer. Keep what it is asked "
            "for in attributes of the model, or run the model under lowtide.online."
        )


def _is_told_by_identity(one: Any) -> bool:
    found: Any = type(one).__hash__
    return isinstance(one, torch.Tensor) or found is object.__hash__


def _referent(key: Any) -> Any:
    return key() if isinstance(key, weakref.ReferenceType) else key


def _mirrors(
    original: Any, copied: Any, copies: Mapping[int, tuple[Any, Any]], tensors: Mapping[int, torch.Tensor]
) -> bool:
    """Whether a copied object still holds the copies of everything that its original holds."""
    (names, mine), (others, theirs) = _parts(original), _parts(copied)
    if names != others or len(mine) != len(theirs):
        return False

    def source(item: Any) -> Any:
        return tensors.get(id(item), copies.get(id(item), (item,))[0])

    def alike(own: Any, item: Any, depth: int = 0) -> bool:
        if source(item) is own:
            return True
        if type(own) is not type(item) or id(item) in copies:
            return False
        if isinstance(own, PLAIN):
            return bool(own == item)
        # A class may recreate parts of its objects when it copies them.
        mine, theirs = content(own), content(item)
        if mine is None or theirs is None or len(mine) != len(theirs) or depth == _DEPTH:
            return False
        return all(alike(*pair, depth + 1) for pair in zip(mine, theirs, strict=True))

    if isinstance(original, (set, frozenset)):
        return {id(source(item)) for item in theirs} == set(map(id, mine))
    return all(map(alike, mine, theirs))


def _parts(value: Any) -> tuple[Any, list[Any]]:
    """The names and values of an object's attributes or items. For modules, without parameters, buffers and other internals."""
    items = None if isinstance(value, nn.Module) else content(value)
    if items is not None:
        return None, [*items]
    own = fields(value)
    if isinstance(value, nn.Module):
        own = {name: item for name, item in own.items() if name not in _NOT_PLAIN}
    return set(own), [own[name] for name in sorted(own)]
