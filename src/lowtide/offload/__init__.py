"""Second memories that run: where schedules move storages to, and back from, while operators run.

``open_memory`` gives the one that goes by a name: ``disk`` or ``disk:/folder``, a file of its own that is gone with the
process, and ``cpu``, the host's memory for an accelerator. A pass leases its room, and moves storages by it; see ``interface``.
"""

from lowtide.offload.bandwidth import with_offload
from lowtide.offload.interface import Copy, Lease, Room, SecondMemoryOf, room_for
from lowtide.offload.registry import open_memory

__all__ = ["Copy", "Lease", "Room", "SecondMemoryOf", "open_memory", "room_for", "with_offload"]
