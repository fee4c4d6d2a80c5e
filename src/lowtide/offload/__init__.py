"""Second memories: where schedules move storages to, and back from, while operators run.

``open_memory`` returns a memory by name: ``disk`` or ``disk:/folder``, a file that is removed with the process, and
``cpu``, the host's memory for an accelerator. A pass leases room in it and moves storages there; see ``interface``.
"""

from lowtide.offload.bandwidth import with_offload
from lowtide.offload.interface import Copy, Lease, Room, SecondMemoryOf, room_for
from lowtide.offload.registry import open_memory

__all__ = ["Copy", "Lease", "Room", "SecondMemoryOf", "open_memory", "room_for", "with_offload"]
