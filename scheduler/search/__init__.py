"""The search for the nodes of each stage."""
