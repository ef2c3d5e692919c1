"""A new plan against the one in force."""
