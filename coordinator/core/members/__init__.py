"""Membership: joining, invitations, leaving, quarantine."""
