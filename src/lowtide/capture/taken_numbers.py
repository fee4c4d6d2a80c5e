"""Operators that take a number which differs from call to call. While a model is traced, stand-ins take the place of
such numbers.

Only operators whose program does not depend on the number may take it: it decides no shape, and what the operator and
its derivative call depends at most on which special number it is, or between which ones it lies. For all other
operators a stand-in is not a number, and the call is traced again with the number itself.
"""

from __future__ import annotations

import contextlib
import math
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from lowtide.capture.positions import stands_in, with_positions
from lowtide.capture.python_state.code.beside import Code, places_of
from lowtide.capture.python_state.guards.compared import StandIn, kind_of
from lowtide.capture.trace.known_values import unknown
from lowtide.capture.trace.patches import all_wrapped

_FREE = """
add sub subtract rsub mul multiply div divide true_divide floor_divide fmod remainder eq ne lt le gt ge less
less_equal greater greater_equal not_equal fill full full_like new_full masked_fill index_fill where scalar_tensor
linspace clamp clamp_min clamp_max clip hardtanh threshold nan_to_num
"""
_OTHERS = """
addcmul addcdiv leaky_relu elu celu softplus hardshrink softshrink layer_norm group_norm rms_norm cosine_similarity
addmm addmv addbmm baddbmm addr
uniform normal smooth_l1_loss huber_loss margin_ranking_loss cosine_embedding_loss hinge_embedding_loss
triplet_margin_loss cross_entropy_loss dropout feature_dropout alpha_dropout bernoulli
"""
# The special numbers of operators, in order, by the name of the operator or of its in-place form.
_SPECIAL: dict[str, tuple[float, ...]] = {
    **dict.fromkeys(_FREE.split(), ()),
    **dict.fromkeys(_OTHERS.split(), (0, 1)),
    "lerp": (0, 0.5, 1),
    "pow": (-2, -1, -0.5, 0, 0.5, 1, 2, 3),
}
_SPECIAL_FACTORS = (0, 1)  # for ``alpha``, a factor of what is added
BUILT_IN = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
_ASKING = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
_MAKING = (torch.tensor, torch.as_tensor)
_DTYPES: dict[type, torch.dtype | None] = {
    float: None, int: torch.int64, np.float64: torch.float64, np.float32: torch.float32, np.int64: torch.int64
}  # fmt: skip
_UNARY = "exp expm1 log log1p log2 log10 sqrt sin cos tan asin acos atan sinh cosh tanh erf fabs radians degrees"
_ASKED = "isnan isinf isfinite"


@contextlib.contextmanager
def followed_by_math(code: Code) -> Iterator[None]:
    """A context in which functions of ``math`` that the model's ``code`` refers to accept stand-ins."""
    with all_wrapped(places_of([(math, [*_UNARY.split(), *_ASKED.split()])], code[1]), _following):
        yield


def _following(function: Callable[..., Any]) -> Callable[..., Any]:
    def follow(*args: Any) -> Any:
        alone = len(args) == 1 and type(args[0]) is StandIn
        if not alone:
            return function(*args)
        return args[0].asked(function) if function.__name__ in _ASKED else args[0].through(function)

    return follow


class TakingNumbers(torch.overrides.TorchFunctionMode):
    """A mode that gives PyTorch's functions numbers in place of stand-ins, if they may take them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {}, sys._getframe(1))

    def run(self, func: Any, args: Any, kwargs: Any, calling: types.FrameType) -> Any:
        """A call that the mode got from the frame ``calling``."""
        if func in _MAKING and _is_list_with_stand_ins(args[0]) and kwargs.keys() <= {"dtype", "device"}:
            with self:
                return _made_of(args[0], **kwargs)
        stands = any(type(one) is StandIn for one in (*args, *kwargs.values())) or stands_in(func, args)
        if stands and isinstance(func, BUILT_IN):
            with unknown():
                return self.called(*_taken(func, args, kwargs), calling)
        opened = _opened(func) if stands or func is torch.autograd.grad else None
        if opened is None:
            return self.called(func, args, kwargs, calling)
        with opened, self:
            return func(*args, **kwargs)

    def called(self, func: Any, args: Any, kwargs: Any, calling: types.FrameType) -> Any:
        """The result of a call whose stand-ins were replaced, or were kept."""
        return func(*args, **kwargs)


def _opened(function: Callable[..., Any]) -> contextlib.AbstractContextManager[None] | None:
    """For a PyTorch function that is written in Python, a context in which it does not hand itself to modes, so that
    they see the functions that it calls. ``None`` for other functions."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    if module is None or getattr(function, "__globals__", None) is not vars(module):
        return None
    return all_wrapped([(module, name) for name in _ASKING if name in vars(module)], lambda _: lambda *_: False)


def _is_list_with_stand_ins(value: Any) -> bool:
    """Whether the value is a list of Python numbers, some of which are stand-ins."""
    listed = value if type(value) in (list, tuple) else ()
    return any(type(one) is StandIn for one in listed) and {*map(kind_of, listed)} <= {int, float}


def _made_of(numbers: Sequence[Any], dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
    """A tensor of these numbers, from tensors of one number each."""
    dtype = dtype or (torch.get_default_dtype() if float in map(kind_of, numbers) else torch.int64)
    return torch.stack([torch.full((), one, dtype=dtype, device=device) for one in numbers])


def _taken(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]:
    """A call with numbers in place of stand-ins, if the function takes them."""
    if function in _MAKING and type(args[0]) is StandIn and kwargs.keys() <= {"dtype", "device"}:
        dtype = _DTYPES[args[0].kind] or torch.get_default_dtype()
        function, args, kwargs = torch.full, ((), args[0], *args[1:]), {"dtype": dtype, **kwargs}
    if not kwargs:
        function, args = with_positions(function, args)
    special = _SPECIAL.get(function.__name__.strip("_"))
    if special is None:
        return function, args, kwargs
    given = [one.taken(special) if type(one) is StandIn else one for one in args]
    special = _SPECIAL_FACTORS if "alpha" in kwargs else special
    named = {name: one.taken(special) if type(one) is StandIn else one for name, one in kwargs.items()}
    return function, given, named
