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
        found = sorted({path for pattern in self.files for path in (root / SOURCE).glob(pattern)})
        if not found:
            raise ValueError(f"region {self.name}: no file matches {' '.join(self.files)}; name where it has gone")
        return [path for path in found if path.name != "__init__.py"]


def _solve(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/solve/test_{name}.py" for name in names)


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
            "compact", "structure", "griewank", "memory_paths", "checkpoints", "timeline", "planners", "brute_force"
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
    Region("solve/milp", ("solve/milp/*.py",), _solve("checkmate", "checkmate_approx", "brute_force")),
    Region(
        "capture",
        ("**/convert.py", "**/overwrites.py", "**/layouts.py", "**/results.py"),
        (
            "tests/correctness/test_layouts.py",
            "tests/correctness/test_written_layouts.py",
            "tests/correctness/test_structures.py",
            "tests/correctness/test_shared_results.py",
            "tests/correctness/test_output_gradients.py",
            "tests/correctness/test_inplace.py",
            "tests/lower/test_overwrites.py",
            "tests/correctness/test_operators.py",
        ),
    ),
)
