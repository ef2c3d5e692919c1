"""The machine: device, memory, identity, trace."""
