"""The event log: its events, what they add up to, and where they are stored."""
