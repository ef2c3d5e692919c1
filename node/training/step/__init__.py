"""What one step computes on this node, and what it sends to the neighbouring stages."""
