"""The model: its layers, buckets, initial values, optimizer and cost."""
