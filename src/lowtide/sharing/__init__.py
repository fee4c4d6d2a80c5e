"""One memory budget for several programs of a step: parts of a model, graphs of ``torch.compile``.

``constraints`` says what must fit at each point of the step, ``choice`` searches for plans with which it does. How programs
are planned is the caller's: planners know nothing of each other.
"""

from lowtide.sharing.assignment import Assignment, Planning, Share
from lowtide.sharing.choice import choose
from lowtide.sharing.constraints import Constraint, Footprint, Member, peak_bytes, sequential_constraints
from lowtide.sharing.plans import Plans

__all__ = [
    "Assignment",
    "Constraint",
    "Footprint",
    "Member",
    "Planning",
    "Plans",
    "Share",
    "choose",
    "peak_bytes",
    "sequential_constraints",
]
