"""The log in a database: who may write it, how it is read, and whether it is true."""
