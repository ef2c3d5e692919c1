"""What this node does before it is ready. Heartbeats tell the coordinator, and the coordinator tells the waiting members."""

from __future__ import annotations

from dtfm.protos import control_pb2 as wire

WHOLE = 1000
"""The number of parts of a task that has no parts of its own."""


class PreparationProgress:
    """For any thread. The heartbeat has the newest task."""

    def __init__(self) -> None:
        self._now = wire.Heartbeat()

    def does(self, what: wire.Preparing, done: int = 0, of: int = 0) -> None:
        """``done`` of ``of``: how far it is; 0 of 0: nobody knows. Large numbers are told as parts of WHOLE."""
        if of > WHOLE:
            done, of = done * WHOLE // of, WHOLE
        self._now = wire.Heartbeat(preparing=what, done=min(done, of), of=of)

    def heartbeat(self, count: int) -> wire.Heartbeat:
        now = self._now
        return wire.Heartbeat(count=count, preparing=now.preparing, done=now.done, of=now.of)
