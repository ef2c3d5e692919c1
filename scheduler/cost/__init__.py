"""The cost of a plan: estimates, simulation, state transfer."""
