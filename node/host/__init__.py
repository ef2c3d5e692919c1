"""The machine: device, links, preemption notices, diagnosis, trace."""
