"""The model: layers, buckets, initial values, placement in a plan, optimizer and cost."""
