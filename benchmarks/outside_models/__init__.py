"""Models of other packages, made small, by field: see ``benchmarks.outside``."""

from benchmarks.outside_models import adapters, densities, language, science, speech, vision, volumes
from benchmarks.outside_models.register import OUTSIDE, Outside

__all__ = ["OUTSIDE", "Outside", "adapters", "densities", "language", "science", "speech", "vision", "volumes"]
