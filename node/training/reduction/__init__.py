"""How the replicas of a stage add up their gradients."""
