"""The tensor program: what capture makes, and what costs, kernels and generated code are made from."""
