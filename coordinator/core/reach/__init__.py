"""Which members reach each other, over which links, and by what ways."""
