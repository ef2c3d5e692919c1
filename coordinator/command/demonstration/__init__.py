"""The demo: a coordinator in this process, and nodes as child processes of it."""
