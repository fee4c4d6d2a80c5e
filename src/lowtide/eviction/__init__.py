"""Dynamic tensor rematerialization's state and scores: which storage to evict next. No torch, no graph.

Kirisame et al., "Dynamic Tensor Rematerialization", ICLR 2021, arXiv 2006.09616, section 2. Whoever runs operators (a
planner over a static graph, a trace, a live program) tells the pool what is computed, used, evicted and released, and asks
it for the next victim; running and freeing are the client's business.
"""

from lowtide.eviction.entry import Entry
from lowtide.eviction.heuristics import HEURISTICS, heuristic_named
from lowtide.eviction.pool import Pool

__all__ = ["HEURISTICS", "Entry", "Pool", "heuristic_named"]
