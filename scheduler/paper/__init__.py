"""The paper's own cost model, bound, search and networks (arXiv 2206.01288)."""
