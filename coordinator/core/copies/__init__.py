"""Where the state is safe: the copies that each node has, standbys, snapshots, and nodes that may return with state."""
