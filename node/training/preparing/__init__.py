"""What a node does before it is ready: it loads the run and times its device."""
