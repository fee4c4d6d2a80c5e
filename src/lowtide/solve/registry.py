"""Planners by name and by textual spec, such as ``auto{effort=2}``.

Grammar::

    spec    ::= name | name "{" option ("," option)* "}"
    option  ::= field "=" value            dashes in field names stand for underscores

A planner is one file with one frozen dataclass, whose fields (``int``, ``float``, ``bool`` or ``str``) are the options,
and one line in ``PLANNERS``. Its module is imported when the planner is first used, so that optional dependencies cost
nothing before.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

from lowtide.errors import PlanError
from lowtide.solve.problem import Planner

# Name: the module below ``lowtide.solve``, the class, and one line on what the planner does.
PLANNERS: dict[str, tuple[str, str, str]] = {
    "auto": ("auto", "Auto", "portfolio of searches over compute sequences; the default"),
    "ap-greedy": ("chen", "ApGreedy", "checkpoints at articulation points, segment bytes swept"),
    "ap-sqrt": ("chen", "ApSqrt", "checkpoints at every root-th articulation point"),
    "checkpoint-all-ap": ("chen", "CheckpointAllAp", "checkpoints at all articulation points"),
    "checkpoint-last": ("chen", "CheckpointLast", "keeps the last forward node only"),
    "chen-greedy": ("chen", "ChenGreedy", "segments of limited bytes cut at articulation points, the limit swept"),
    "chen-sqrt": ("chen", "ChenSqrt", "about root n segments cut at articulation points"),
    "checkmate": ("checkmate", "Checkmate", "exact mixed-integer program (needs highspy); up to about 150 operators"),
    "checkmate-approx": (
        "checkmate_approx",
        "CheckmateApprox",
        "linear relaxation and two-phase rounding (needs highspy); up to about 400 operators",
    ),
    "dtr": ("dtr", "Dtr", "the eviction heuristics of dynamic tensor rematerialization, ahead of time"),
    "greedy": ("greedy", "Greedy", "evicts what is cheapest to rebuild per byte and time to next use"),
    "griewank": ("griewank", "Griewank", "binomial checkpointing of a chain, the slots swept"),
    "keep-all": ("keep_all", "KeepAll", "recomputes nothing, frees at the last use"),
    "linearized-greedy": ("chen", "LinearizedGreedy", "checkpoints at any node, segment bytes swept"),
    "linearized-sqrt": ("chen", "LinearizedSqrt", "checkpoints at every root-th forward node"),
    "h-rockmate": ("block_programs", "HRockmate", "recursive partition, options composed upwards"),
    "rockmate": ("block_programs", "Rockmate", "a menu of options per block, dynamic program over the chain"),
    "offload": ("offload", "Offload", "moves results to a second memory and back, computes nothing again"),
    "pofo": ("pofo", "Pofo", "dynamic program over a chain of blocks, which are kept, run again or moved"),
    "rotor": ("block_programs", "Rotor", "dynamic program over a chain of blocks, each saved whole or not at all"),
}


def planner_names() -> tuple[str, ...]:
    return tuple(PLANNERS)


def planner_summary(name: str) -> str:
    """Return the one-line summary of a planner."""
    return _entry(name)[2]


def get_planner(spec: str) -> Planner:
    """Make the planner that a spec describes. Raises ``PlanError`` naming the known planners or options."""
    if not isinstance(spec, str):
        raise PlanError(f"a planner is named by a string such as 'auto{{effort=2}}', not by {spec!r}")
    name, brace, rest = spec.strip().partition("{")
    module, class_name, _ = _entry(name.strip())
    cls = getattr(importlib.import_module(f"lowtide.solve.{module}"), class_name)
    if brace and not rest.endswith("}"):
        raise PlanError(f"planner spec {spec!r} lacks its closing brace; write for instance 'auto{{effort=2}}'")
    planner: Planner = cls(**_options(spec, cls, rest.removesuffix("}")))
    return planner


def format_spec(planner: Planner) -> str:
    """Return the spec of a planner, the inverse of ``get_planner``; options at their defaults are left out."""
    name = next((n for n, (_, cls, _) in PLANNERS.items() if cls == type(planner).__name__), type(planner).__name__)
    changed = [
        f"{field.name.replace('_', '-')}={str(value).lower() if isinstance(value, bool) else value}"
        for field in dataclasses.fields(planner)  # type: ignore[arg-type]
        if (value := getattr(planner, field.name)) != field.default
    ]
    return f"{name}{{{','.join(changed)}}}" if changed else name


def _entry(name: str) -> tuple[str, str, str]:
    if name not in PLANNERS:
        braces = "; options are written in braces: 'auto{effort=2}'" if set(name) & set(":,(=[") else ""
        raise PlanError(f"no planner is named {name!r}{braces}; known: {', '.join(PLANNERS)}")
    return PLANNERS[name]


def _options(spec: str, cls: Any, text: str) -> dict[str, Any]:
    fields = {field.name: field for field in dataclasses.fields(cls)}
    options: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = (piece.strip() for piece in part.partition("="))
        name, key = key.replace("-", "_"), key.replace("_", "-")
        if name not in fields:
            known = ", ".join(fields).replace("_", "-") or "none"
            raise PlanError(f"planner spec {spec!r}: no option {key!r}; known: {known}")
        options[name] = _value(spec, key, value, type(fields[name].default))
    return options


def _value(spec: str, key: str, text: str, kind: type) -> Any:
    try:
        return {"true": True, "false": False}[text] if kind is bool else kind(text)
    except (KeyError, ValueError):
        expected = "true or false" if kind is bool else f"a value of type {kind.__name__}"
        raise PlanError(f"planner spec {spec!r}: {key} needs {expected}, not {text!r}") from None
