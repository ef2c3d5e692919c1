"""What the coordinator knows: the ledger, and what this process remembers beside it."""
