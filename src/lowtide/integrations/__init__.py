"""lowtide inside other tools: one module per tool, imported on demand. ``import lowtide`` imports none of them."""
