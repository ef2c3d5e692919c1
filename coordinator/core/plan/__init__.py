"""The plan: what the planner is asked, when, and how its answer comes into force."""
