"""The search over which nodes hold which stage."""
