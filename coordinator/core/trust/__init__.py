"""Which nodes to believe: verdicts as values with a reason. Pure; core/members/quarantine.py carries them out."""
