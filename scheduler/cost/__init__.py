"""What a plan costs: estimates, simulation, bounds."""
