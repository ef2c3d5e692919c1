"""What events do to parts of the ledger, for fold.py."""
