"""NETWORK.json, WORKLOAD.json and PLAN.json: from text to values, and plans back. Opens no files.

Every parser raises ValueError with the path of the field, its value, and what would be right.
"""
