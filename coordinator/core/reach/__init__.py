"""Which members reach each other, their links, and their ways."""
