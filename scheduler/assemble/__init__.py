"""From the groups of nodes that hold each stage to a whole plan: cuts, routes, the order of stages."""
