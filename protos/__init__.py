"""The wire: messages, generated stubs, how a connection is opened, raw tensor streams."""
