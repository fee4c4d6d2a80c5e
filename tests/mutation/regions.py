"""Which tests notice a change of which files, the quick ones first."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SOURCE = Path("src/lowtide")


@dataclass(frozen=True, slots=True)
class Region:
    """``files``: patterns below ``src/lowtide``. ``tests``: run one after the other until one fails."""

    name: str
    files: tuple[str, ...]
    tests: tuple[str, ...]

    def sources(self, root: Path) -> list[Path]:
        found = {pattern: list((root / SOURCE).glob(pattern)) for pattern in self.files}
        gone = [pattern for pattern, paths in found.items() if not paths]
        if gone:
            raise ValueError(f"region {self.name}: no file matches {' '.join(gone)}; name where it has gone")
        return sorted({path for paths in found.values() for path in paths if path.name != "__init__.py"})


def _solve(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/solve/test_{name}.py" for name in names)


def _correctness(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/correctness/test_{name}.py" for name in names)


REGIONS = (
    Region("ir", ("ir/*.py",), ("tests/ir", "tests/trace/test_dag.py")),
    Region(
        "solve",
        ("solve/*.py",),
        _solve("registry", "within", "greedy", "griewank", "dtr", "rotor", "rockmate", "planners", "checkpoints")
        + _solve("checkmate", "checkmate_approx", "brute_force"),
    ),
    Region(
        "solve/model",
        ("solve/model/*.py",),
        _solve(
            "compact",
            "structure",
            "griewank",
            "memory_paths",
            "checkpoints",
            "timeline",
            "planners",
            "brute_force",
            "moving",
        ),
    ),
    Region(
        "solve/search",
        ("solve/search/*.py",),
        _solve(
            "greedy", "timeline", "recombine", "memory_paths", "compact", "within", "planners", "bounds", "brute_force"
        ),
    ),
    Region("solve/blocks", ("solve/blocks/*.py",), _solve("rotor", "blocks", "rockmate", "brute_force")),
    Region("solve/bounds", ("solve/bounds/*.py",), _solve("bounds", "planners", "brute_force")),
    Region(
        "solve/moving",
        ("solve/moving/*.py",),
        _solve("moving", "moving_program", "pofo", "moving_optimum", "steps"),
    ),
    Region("solve/milp", ("solve/milp/*.py",), _solve("checkmate", "checkmate_approx", "brute_force")),
    Region(
        "capture/convert",
        ("capture/convert/*.py", "**/overwrites.py", "**/layouts.py", "**/results.py"),
        (
            "tests/capture/test_refused.py",
            *_correctness("layouts", "written_layouts", "structures", "shared_results", "output_gradients", "inplace"),
            "tests/lower/test_overwrites.py",
            *_correctness("operators", "parameters", "chunked_loss", "nested_writes"),
        ),
    ),
    Region(
        "capture/trace",
        ("capture/*.py", "capture/trace/*.py"),
        (
            *_correctness("clean_capture", "layouts", "inplace", "random", "exceptions", "unseen_effects", "modes"),
            "tests/fuzz/test_modules.py",
            *_correctness("attributes", "outside", "buffers", "bad_input", "parameters", "structures", "operators"),
        ),
    ),
    Region(
        "capture/python_state/guards",
        ("capture/python_state/*.py", "capture/python_state/guards/*.py", "objects/*.py"),
        (
            "tests/fuzz/test_python_changes.py",
            *_correctness("attributes", "outside", "followed", "closures", "compared_numbers", "held_numbers"),
            *_correctness("classes_asked", "variables", "clocks", "changes", "unseen_effects"),
        ),
    ),
    Region(
        "capture/python_state/code",
        ("capture/python_state/code/*.py",),
        _correctness("exceptions", "outside", "variables", "followed", "classes_asked", "changes", "unseen_effects"),
    ),
    Region(
        "capture/python_state/effects",
        ("capture/python_state/effects/*.py",),
        _correctness("attributes", "buffers", "random", "written_arguments", "left_tensors", "counters", "changes"),
    ),
    Region("place", ("place/*.py",), ("tests/place",)),
    Region("sharing", ("sharing/*.py",), ("tests/sharing",)),
    Region(
        "planning",
        ("planning/*.py", "pipeline.py"),
        ("tests/test_planning.py", "tests/test_plan_cache.py", "tests/runtime/test_background.py"),
    ),
    Region("store", ("store/*.py",), ("tests/store", "tests/test_plan_cache.py")),
    Region("eviction", ("eviction/*.py", "trace/*.py"), ("tests/eviction", "tests/trace")),
)
