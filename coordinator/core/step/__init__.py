"""A step from its beginning to its commit or abort, and what follows a commit."""
