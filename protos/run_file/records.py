"""How a run file names sources and their records. It imports nothing, so that nodes need not load the run file's tables."""

STANDARD_LIBRARY = "python-stdlib"
"""The source text of the installed Python."""

HUB = "hf:"
"""Before the name of a data set on the Hugging Face hub, or of a folder of that form."""

MESSAGES = "messages"
"""The text_field of sources whose records are conversations."""
