"""The machine: device, memory, preemption notices, identity, trace."""
