"""The values that the scheduler works on: cluster, workload, plan."""
