"""How a run file names what its sources' records are. It imports nothing, so that nodes need not load the run file's tables."""

MESSAGES = "messages"
"""The text_field of sources whose records are conversations."""
