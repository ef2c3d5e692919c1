"""The model's state on this node: held, served, fetched, copied as a standby, and stored in snapshots."""
