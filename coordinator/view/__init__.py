"""What people see: the event log as sentences, tables and progress."""
