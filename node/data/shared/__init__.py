"""Tokens that nodes share: on one machine, beside checkpoints, and in places that several nodes reach."""
