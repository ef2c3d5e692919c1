"""Audits: part of a step's work is done again by others, after all votes and before the commit, which waits for their answers.

core/trust says which work (draw.py), how far results may be apart (tolerance.py) and whom to believe. Here audits are ordered,
asked, answered and judged; stepping/commits.py carries the conclusion out.
"""
