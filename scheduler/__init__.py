"""Which work goes to which node: pure functions from (cluster, workload, incumbent plan) to a plan."""
