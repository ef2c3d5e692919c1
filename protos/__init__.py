"""The wire: messages and their generated stubs, how connections are opened, raw tensor streams."""

PROTOCOL_VERSION = 36
"""The version that Hello carries. Add 1 whenever an older version would misread the messages."""

DEFAULT_ADDRESS = "127.0.0.1:7400"
"""Where a coordinator listens, and is looked for."""

MEASURED_TOGETHER = 8
"""The most peers, the nearest ones, that LinkReport.up and down are measured to together."""

PEER_FRACTION = 0.5
"""Of an audit's time (Audit.seconds), by which one peer may keep its auditor waiting in all. So the auditor can still say who it
was."""
