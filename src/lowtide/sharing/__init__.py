"""One budget shared: among programs of a pass that are planned one by one, and one plan among the ranks of a training."""
