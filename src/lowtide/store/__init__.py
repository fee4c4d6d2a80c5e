"""Data kept on disk between processes: typed entries under content keys, written atomically, locked, limited in number,
never trusted.

Any problem of the disk counts as a miss, with one line in the log: damaged files, wrong types or impossible sizes,
folders that cannot be read or written, a full disk. This package depends on the errors only, not on torch or plans.
"""

from lowtide.store.cache import Cache, cache_folder
from lowtide.store.files import write_atomically
from lowtide.store.keys import content_key, sources_key

__all__ = ["Cache", "cache_folder", "content_key", "sources_key", "write_atomically"]
