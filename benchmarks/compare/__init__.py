"""lowtide beside everything else that trades time for memory, measured side by side; see ``benchmarks.compare.__main__``."""
