"""Checks of what nodes send: everything is bounded and validated here before it is used."""
