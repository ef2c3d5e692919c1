"""Health: which nodes and which pairs work. Never guilt."""
