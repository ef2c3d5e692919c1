"""The search over who holds which stage."""
