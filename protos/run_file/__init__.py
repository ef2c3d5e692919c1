"""The run file: its tables, how it is read, errors that name the key, the value and the fix."""
