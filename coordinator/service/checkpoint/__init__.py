"""A checkpoint in its place: its files as they come, its folder, and the model as others read it."""
