"""Dynamic programs over blocks: cutting a graph, options per block, composing them."""
