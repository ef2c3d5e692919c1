"""``python -m dtfm.node`` is ``dtfm-node``."""

from __future__ import annotations

from dtfm.programs import node

if __name__ == "__main__":
    node()
