"""The training data: sources, tokens, samples."""
