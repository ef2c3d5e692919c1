"""The log in a database: who may write it, how it is read, and its check."""
