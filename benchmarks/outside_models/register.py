"""The register of models of other packages, and what their fields share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.zoo import Factory, seeded


@dataclass(frozen=True, slots=True)
class Outside:
    """A model of ``package`` (its name where it is installed from); ``make`` builds it and a sample."""

    package: str
    make: Factory


OUTSIDE: dict[str, Outside] = {}


def outside(package: str) -> Callable[[Factory], Factory]:
    """Register a model of ``package`` under the name of the function that makes it. Packages are imported in there."""

    def register(make: Factory) -> Factory:
        if make.__name__ in OUTSIDE:
            raise ValueError(f"there are two outside models named {make.__name__}")
        factory = seeded(make)
        OUTSIDE[make.__name__] = Outside(package, factory)
        return factory

    return register
