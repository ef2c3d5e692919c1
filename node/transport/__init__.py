"""Tensors on their way between nodes: sending, receiving, and what is accepted."""
