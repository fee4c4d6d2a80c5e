"""What a step takes at each of its points, by hand for two programs."""

from __future__ import annotations

from lowtide.sharing import Constraint, Footprint, peak_bytes, sequential_constraints

FIRST = Footprint(saved_bytes=10, forward_bytes=40, backward_bytes=50)
SECOND = Footprint(saved_bytes=20, forward_bytes=70, backward_bytes=60)


def test_a_step_of_two_programs() -> None:
    constraints = sequential_constraints([0, 1], [(1, 2), (3, 4)], [100, 0])
    totals = [constraint.total_bytes([FIRST, SECOND]) for constraint in constraints]
    assert totals == [1 + 40, 2 + 100 + 50, 3 + 10 + 70, 4 + 10 + 60]
    assert peak_bytes(constraints, [FIRST, SECOND]) == 152


def test_a_program_that_runs_twice_saves_twice() -> None:
    constraints = sequential_constraints([0, 0], [(0, 0), (0, 0)], [0, 0])
    assert [constraint.total_bytes([FIRST]) for constraint in constraints] == [40, 50, 50, 60]


def test_programs_within_the_backward_pass_of_others() -> None:
    """The first waits while the second and the third run, one after the other, from one pass to the other."""
    waiting: list[tuple[int, ...]] = [(), (0,), (0,)]
    constraints = sequential_constraints([0, 1, 1], [(1, 2), (3, 4), (5, 6)], [0, 100, 0], waiting)
    totals = [constraint.total_bytes([FIRST, SECOND]) for constraint in constraints]
    assert totals == [1 + 40, 2 + 50, 3 + 10 + 70, 4 + 100 + 10 + 60, 5 + 10 + 70, 6 + 10 + 60]


def test_between_programs() -> None:
    """Where none runs: what is saved."""
    assert Constraint(5, -1, True, (0, 1)).total_bytes([FIRST, SECOND]) == 35
