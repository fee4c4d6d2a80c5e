"""State and scores of dynamic tensor rematerialization: which storage to evict next. No torch, no graph.

Kirisame et al., "Dynamic Tensor Rematerialization", ICLR 2021, arXiv 2006.09616, section 2. The client (a planner over
a static graph, a trace, a live program) tells the pool what is computed, used, evicted and released, and asks it for
the next victim. It runs operators and frees memory itself.
"""

from lowtide.eviction.entry import Entry
from lowtide.eviction.heuristics import HEURISTICS, heuristic_named
from lowtide.eviction.pool import Pool

__all__ = ["HEURISTICS", "Entry", "Pool", "heuristic_named"]
