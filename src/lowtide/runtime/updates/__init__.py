"""Optimizers whose updates run inside of the backward pass, and states of theirs in a second memory."""
