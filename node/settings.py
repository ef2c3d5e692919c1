"""How a node joins a run: what its operator has said, without PyTorch, which takes seconds to load."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from dtfm.protos.control_pb2 import Hello
from dtfm.protos.identity.enrolment import Entry
from dtfm.protos.identity.private_files import cache_folder


@dataclass(frozen=True, slots=True)
class Settings:
    """How this node joins. Addresses are HOST:PORT; peers reach it at ``advertise``, IP addresses with or without a port;
    ``facing`` is this machine's address that faces the coordinator. ``relay``: whether connections of others may pass
    through this node. With ``open_port`` it asks the home router to open its port.

    ``coordinator`` is the way to it. ``give_up_after`` is the number of seconds without a coordinator after
    which the node exits, until it is let in: then the run says how long.

    ``allowed_modules`` and ``allowed_data`` are the code and the local files that the run may name (see
    import_allowed and check_places); None: what it was allowed before. With ``leave_on_preemption`` the node leaves when
    its cloud gives notice. ``snapshots`` is the folder for its part in snapshots on disks.
    """

    coordinator: Entry
    node: str
    listen: str
    advertise: tuple[str, ...]
    facing: str
    relay: Hello.Relay
    give_up_after: float
    open_port: bool = False
    allowed_modules: tuple[str, ...] | None = None
    allowed_data: tuple[str, ...] | None = None
    leave_on_preemption: bool = False
    snapshots: Path = field(default_factory=lambda: (cache_folder() / "snapshots").absolute())
