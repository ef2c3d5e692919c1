"""Health: which nodes and which pairs of nodes work. Health says nothing about guilt."""
