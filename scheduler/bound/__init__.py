"""Certified lower bounds on the seconds per step of any plan."""
