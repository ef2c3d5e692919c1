"""The coordinator's port: who may connect, for how long, and which calls are for whom."""
