"""The run file: its schema, and errors that name the key, the value and the fix."""
