"""The cost of a plan: estimates, simulation, bounds, state transfer."""
