"""Where the state is safe: who has which copy, standbys, snapshots, and nodes that may return with state."""
