"""Replanning: compares a new plan with the incumbent."""
