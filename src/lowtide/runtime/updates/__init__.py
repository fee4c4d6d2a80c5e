"""Optimizers that update inside the backward pass, and their states in a second memory."""
