"""lowtide inside other tools: one module per tool, imported where it is used. None is imported with ``lowtide``."""
