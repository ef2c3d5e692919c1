"""Tensors between nodes: sending, receiving, and deciding which frames to accept."""
