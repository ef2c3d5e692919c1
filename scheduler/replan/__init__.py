"""Replanning: a new plan compared with the incumbent."""
