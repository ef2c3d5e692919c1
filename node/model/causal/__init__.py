"""Causal language models of transformers: how they are configured, cut, computed and filled with weights."""
