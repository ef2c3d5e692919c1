"""The machine: its device, its links, preemption notices, and what a node did when."""
