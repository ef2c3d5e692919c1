"""What would stop this machine from taking part in a run, and how to fix it."""
