"""Decides which node does which work: pure functions from (cluster, workload, incumbent plan) to a plan."""
