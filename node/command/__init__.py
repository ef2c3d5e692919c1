"""What `dtfm-node` does, a file per command."""
