"""Whom to believe: verdicts as values with a reason. Pure; core/quarantine.py carries them out."""
