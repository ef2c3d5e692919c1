"""The coordinator's decisions: `tick` and its parts. Pure: no clock, no sockets, no disk."""
