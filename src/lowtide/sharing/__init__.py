"""One memory budget for several programs of a step: parts of a model, or graphs of ``torch.compile``.

``constraints`` says what must fit at each point of the step. ``choice`` searches for plans that meet it. The caller
supplies the function that plans one program; planners know nothing of each other.
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
