"""Bounds of the texts that a node writes after an evaluation, for the prompts of the run file."""

MOST_PROMPTS = 4
MOST_PROMPT_CHARACTERS = 500
MOST_TOKENS = 64
"""The number of tokens that are written for each prompt."""
MOST_TEXT_CHARACTERS = 1000
"""Longer texts are cut."""
