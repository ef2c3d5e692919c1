"""The model's state on this node: what it holds, gives, fetches, copies and writes."""
