"""Tracing: the joint forward and backward graph of a function of tensors, on fake tensors."""
