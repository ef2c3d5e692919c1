"""Mirrors protos/local_network."""
