"""From who holds which stage to a whole plan: cuts, routes, the order of stages."""
