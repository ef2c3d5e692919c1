"""Other replicas' work repeated, and the tensors that are kept for that."""
