"""How a node joins a run: what its operator has said, without PyTorch, which takes seconds to load."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from pathlib import Path

from dtfm.node.data.allowed import ALLOW, ALLOW_MODULE, EVERYTHING, Allowed
from dtfm.protos.control_pb2 import Hello
from dtfm.protos.identity.access import Access, runs_it, with_permissions
from dtfm.protos.identity.enrolment import Entry
from dtfm.protos.identity.private_files import cache_folder

log = logging.getLogger(__name__)


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

    def remember_allowed(self, access: Access, is_first: bool) -> Allowed:
        """What the run may name here. Keeps with the membership what this machine's operator allows now; what the operator has
        not said is as before, which is logged if ``is_first``."""
        data, modules = self.allowed_data, self.allowed_modules
        before = with_permissions(access)
        now = replace(
            before,
            allowed_data=before.allowed_data if data is None else data,
            allowed_modules=before.allowed_modules if modules is None else modules,
        )
        if now != access:
            self.coordinator.remember(now)
        for option, said, kept in ((ALLOW, data, now.allowed_data), (ALLOW_MODULE, modules, now.allowed_modules)):
            if is_first and said is None and kept:
                log.info("As before, the run may use %s (%s changes that)", ", ".join(kept), option)
        # Who runs the coordinator has named the paths, and may use them anyway.
        places = EVERYTHING if runs_it(access.pin) else now.allowed_data
        return Allowed(places, now.allowed_modules)
