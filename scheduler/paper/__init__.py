"""The paper's own cost model, bound and search (arXiv 2206.01288)."""
