"""Models that are no single program: submodules have their own plans and share a budget with the code between them."""
