"""What people see of a run: projections of the event log."""
