"""The coordinator's command where an operator is asked before any step is given up, as if steps took minutes:
``python -m tests.cluster.asks_at_once serve ...``."""

from __future__ import annotations

from dtfm.coordinator.core.copies import lost_state
from tests.cluster import alike


def main() -> None:
    lost_state.ASK_SECONDS = 1e-6
    alike.main()


if __name__ == "__main__":
    main()
