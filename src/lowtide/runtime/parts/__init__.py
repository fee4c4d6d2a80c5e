"""Models that are no single program: submodules with plans of their own, which share a budget with what lies between them."""
