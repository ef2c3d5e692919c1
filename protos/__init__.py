"""The wire: messages, generated stubs, how a connection is opened, raw tensor streams."""

PROTOCOL_VERSION = 5
"""What Hello carries; +1 whenever an older side would misread a newer one's messages."""
