"""Who takes part: joining, invitations, leaving, quarantine."""
