"""Text to tokens: the tokenizer, its files, and conversations as one text."""
