"""What is kept on disk between processes: typed entries under content keys, written whole, locked, bounded and never trusted.

Everything that a disk can do is a miss with one line in the log: files that are damaged, of other types or of impossible sizes,
folders that cannot be read or written, a disk that is full. Below everything but the errors: it knows neither torch nor plans.
"""

from lowtide.store.cache import Cache, cache_folder
from lowtide.store.files import write_atomically
from lowtide.store.keys import content_key, sources_key

__all__ = ["Cache", "cache_folder", "content_key", "sources_key", "write_atomically"]
