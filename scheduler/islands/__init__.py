"""The search over partitions of the nodes into islands, each with a plan of its own."""
