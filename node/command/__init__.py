"""The commands of `dtfm-node`, a file per command."""
