"""The weights of a checkpoint on their way into an export, piece by piece."""
