"""The coordinator's command where certificates last for seconds: ``python -m tests.cluster.short_certificates serve ...``."""

from __future__ import annotations

from datetime import timedelta
from functools import partial

from dtfm.coordinator.core.members import membership
from dtfm.coordinator.service import server
from dtfm.protos.identity.credentials import issue
from tests.cluster import alike

LIFETIME = timedelta(seconds=6)


def main() -> None:
    membership.CERTIFICATE_LIFETIME = LIFETIME  # type: ignore[attr-defined]
    server.issue = partial(issue, lifetime=LIFETIME)  # type: ignore[attr-defined]
    alike.main()


if __name__ == "__main__":
    main()
