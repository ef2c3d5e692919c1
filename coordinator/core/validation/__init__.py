"""Checks of nodes' messages: everything is bounded and validated here before it is used."""
