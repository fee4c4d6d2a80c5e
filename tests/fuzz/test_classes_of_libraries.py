"""Between two steps a class of a library, no module's and no tensor's, gets another method: the next step is as in eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributions

from tests.fuzz.changed import Computes, follows, having

_Compute = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]


class _Wide(distributions.Normal):
    """A class of the user's that has it from the library's."""


def _normal(y: torch.Tensor) -> distributions.Normal:
    return distributions.Normal(y, y.exp())


CASES: dict[str, tuple[type, str, _Compute]] = {
    "made": (distributions.Normal, "rsample", lambda self, y, x: _normal(y).rsample()),
    "held": (distributions.Normal, "log_prob", lambda self, y, x: self.prior.log_prob(y)),
    "a property": (distributions.Normal, "mean", lambda self, y, x: y * _normal(y).mean),
    "from a base": (distributions.Distribution, "perplexity", lambda self, y, x: _normal(y).perplexity()),
    "made by": (distributions.Normal, "__init__", lambda self, y, x: y * _normal(y).loc),
    "of a user's class": (distributions.Normal, "rsample", lambda self, y, x: _Wide(y, 1.0).rsample()),
}


def _halved(found: Any) -> Any:
    """Another method, or property, for one that was found in a class."""
    if isinstance(found, property):
        return property(lambda self: found.fget(self) / 2)  # type: ignore[misc]

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if found.__name__ == "__init__":
            return found(self, args[0] / 2, *args[1:], **kwargs)
        return found(self, *args, **kwargs) / 2

    return run


@pytest.mark.parametrize("case", CASES)
def test_a_method_of_a_library_class(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, compute = CASES[case]
    model = Computes(compute, having(prior=lambda: distributions.Normal(torch.zeros(4), torch.ones(4))))
    follows(model, lambda model: monkeypatch.setattr(owner, name, _halved(vars(owner)[name])))


def test_a_method_that_comes_below_the_inherited_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, the base's was found."""
    model = Computes(lambda self, y, x: _normal(y).perplexity())
    other = lambda self: self.loc / 2  # noqa: E731
    follows(model, lambda model: monkeypatch.setattr(distributions.Normal, "perplexity", other, raising=False))
