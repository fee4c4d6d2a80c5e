"""Moves of the search over sequences: each fills the edit lists of a ``Scratch``. Compiled.

A sequence is the buffer ``codes`` from ``start`` on (see ``lowtide.solve.sweep``). A move returns how many insertions
it has listed (positions descending), or -1 where it found nothing to do. ``classes`` numbers the nodes that stand at
the same place of a repeated block alike; group moves do in every repeat what they do in one.
"""

from __future__ import annotations

from lowtide.solve.compact import Indices
from lowtide.solve.compiled import kernel
from lowtide.solve.sweep import Scratch, random_below
from lowtide.solve.tables import Tables


@kernel
def node_of(code: int) -> int:
    return code if code >= 0 else ~code


@kernel
def random_recompute(scratch: Scratch, codes: Indices, start: int) -> int:
    """The position of a recompute, -1 where none is met: the first one at or before a random position."""
    at = start + random_below(scratch.rng, len(codes) - start)
    for position in range(at, start - 1, -1):
        if codes[position] < 0:
            return position
    return -1


@kernel
def first_compute(codes: Indices, start: int, node: int) -> int:
    """The position of the first compute of a node; first computes stand in ascending order."""
    low, high = start, len(codes) - 1
    while low < high:
        middle = (low + high) // 2
        at = middle
        while at > low and codes[at] < 0:
            at -= 1
        if codes[at] >= node:
            high = at
        else:
            low = middle + 1
    return low


@kernel
def random_read(t: Tables, scratch: Scratch, codes: Indices, start: int) -> tuple[int, int]:
    """A position and the index in ``t.reads`` of one of its reads that could be recomputed; -1 without one.

    Half of the time any step, else a first compute that has not been near what it reads for long.
    """
    if random_below(scratch.rng, 4) != 0 and len(t.gaps) > 0:
        read = t.gaps[random_below(scratch.rng, len(t.gaps))]
        position = first_compute(codes, start, t.read_node[read])
    else:
        position = start + 1 + random_below(scratch.rng, len(codes) - start - 1)
        node = node_of(codes[position])
        reads = t.reads_start[node + 1] - t.reads_start[node]
        if reads == 0:
            return position, -1
        read = t.reads_start[node] + random_below(scratch.rng, reads)
    base = t.storage_node[t.reads[read]]
    if not t.recomputable[base] or t.held[t.reads[read]] or node_of(codes[position - 1]) == base:
        return position, -1
    return position, read


@kernel
def chunk_start(codes: Indices, start: int, position: int) -> int:
    """The first of the run of recomputes that ends just before the position (the position itself without one)."""
    while position > start and codes[position - 1] < 0:
        position -= 1
    return position


@kernel
def insert_before_use(t: Tables, scratch: Scratch, codes: Indices, start: int) -> int:
    """Recompute what a random step reads just before it, or before the recomputes that precede it."""
    position, read = random_read(t, scratch, codes, start)
    if read < 0:
        return -1
    base = t.storage_node[t.reads[read]]
    if random_below(scratch.rng, 4) == 0:
        earlier = chunk_start(codes, start, position)
        for i in range(earlier, position):
            if node_of(codes[i]) == base:
                return -1
        position = earlier
    scratch.insert_at[0] = position
    scratch.insert_node[0] = base
    return 1


@kernel
def insert_in_group(t: Tables, classes: Indices, scratch: Scratch, codes: Indices, start: int) -> int:
    """As ``insert_before_use``, for the same read of every step of the same class."""
    position, read = random_read(t, scratch, codes, start)
    if read < 0:
        return -1
    node = node_of(codes[position])
    again = codes[position] < 0
    kind = classes[t.storage_node[t.reads[read]]]
    count = 0
    for at in range(len(codes) - 1, start, -1):
        here = node_of(codes[at])
        if classes[here] != classes[node] or (codes[at] < 0) != again or count == len(scratch.insert_at):
            continue
        for i in range(t.reads_start[here], t.reads_start[here + 1]):
            base = t.storage_node[t.reads[i]]
            if classes[base] == kind and t.recomputable[base] and node_of(codes[at - 1]) != base:
                scratch.insert_at[count] = at
                scratch.insert_node[count] = base
                count += 1
                break
    return count


@kernel
def remove_one(scratch: Scratch, codes: Indices, start: int) -> int:
    position = random_recompute(scratch, codes, start)
    if position < 0:
        return -1
    scratch.removed[position] = 1
    return 0


@kernel
def remove_run(scratch: Scratch, codes: Indices, start: int) -> int:
    """Remove a few consecutive recomputes."""
    position = random_recompute(scratch, codes, start)
    if position < 0:
        return -1
    count = 2 + random_below(scratch.rng, 4)
    while position >= start and codes[position] < 0 and count > 0:
        scratch.removed[position] = 1
        position -= 1
        count -= 1
    return 0


@kernel
def remove_in_group(classes: Indices, scratch: Scratch, codes: Indices, start: int) -> int:
    """Remove every recompute of one class."""
    position = random_recompute(scratch, codes, start)
    if position < 0:
        return -1
    kind = classes[node_of(codes[position])]
    for at in range(start, len(codes)):
        if codes[at] < 0 and classes[node_of(codes[at])] == kind:
            scratch.removed[at] = 1
    return 0


@kernel
def previous_compute(codes: Indices, position: int, node: int) -> int:
    """The last position before the given one that computes the node, recomputes included."""
    position -= 1
    while node_of(codes[position]) != node:
        position -= 1
    return position


@kernel
def shift(t: Tables, scratch: Scratch, codes: Indices, start: int) -> int:
    """Move a recompute: to just before its next use, or a random distance either way."""
    position = random_recompute(scratch, codes, start)
    if position < 0:
        return -1
    node = node_of(codes[position])
    scratch.removed[position] = 1
    scratch.insert_node[0] = node
    if random_below(scratch.rng, 2) == 0:
        distance = 1 << random_below(scratch.rng, 7)
        earliest = previous_compute(codes, position, node) + 1
        offset = random_below(scratch.rng, 2 * distance + 1) - distance
        scratch.insert_at[0] = min(max(position + offset, earliest), len(codes) - 1)
        return 1
    at = position + 1
    while at < len(codes) - 1 and not reads_from(t, node_of(codes[at]), node):
        at += 1
    if random_below(scratch.rng, 2) == 0 and at < len(codes) - 1:  # its use after next
        at += 1
        while at < len(codes) - 1 and not reads_from(t, node_of(codes[at]), node):
            at += 1
    scratch.insert_at[0] = at
    return 1


@kernel
def reads_from(t: Tables, reader: int, node: int) -> bool:
    for i in range(t.reads_start[reader], t.reads_start[reader + 1]):  # noqa: SIM110 (numba has no generators in any)
        if t.storage_node[t.reads[i]] == node:
            return True
    return False


@kernel
def swap(t: Tables, scratch: Scratch, codes: Indices, start: int) -> int:
    """Remove one recompute and insert another."""
    count = insert_before_use(t, scratch, codes, start)
    if count < 0 or remove_one(scratch, codes, start) < 0:
        return -1
    return count


@kernel
def step_down(t: Tables, scratch: Scratch, codes: Indices, start: int) -> int:
    """Keep the result of a recompute by recomputing one of its inputs instead, or one of its readers."""
    position = random_recompute(scratch, codes, start)
    if position < 0:
        return -1
    node = node_of(codes[position])
    scratch.removed[position] = 1
    if random_below(scratch.rng, 2) == 0:
        reads = t.reads_start[node + 1] - t.reads_start[node]
        if reads == 0:
            return 0
        other = t.storage_node[t.reads[t.reads_start[node] + random_below(scratch.rng, reads)]]
        at = position
    else:
        owned = t.owns[t.owns_start[node]]
        users = t.uses_start[owned + 1] - t.uses_start[owned]
        if users == 0:
            return 0
        other = t.uses[t.uses_start[owned] + random_below(scratch.rng, users)]
        at = position + 1
        while at < len(codes) - 1 and not reads_from(t, node_of(codes[at]), other):
            at += 1
        for i in range(start, at + 1):
            if codes[i] == other:
                break
        else:
            return 0
    if not t.recomputable[other]:
        return 0
    scratch.insert_at[0] = at
    scratch.insert_node[0] = other
    return 1
