"""Tensors to wire bytes and back."""
