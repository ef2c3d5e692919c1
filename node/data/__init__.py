"""The training data: sources, tokens, samples, and the code that a run may name."""
