"""This node's part in training: one generation at a time, one step at a time."""
