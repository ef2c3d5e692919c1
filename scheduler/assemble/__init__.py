"""From the groups of nodes that hold each stage to a whole plan: cuts, flows, the order of stages."""
