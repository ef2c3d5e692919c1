"""``python -m dtfm.node`` is ``dtfm-node``."""

from __future__ import annotations

from dtfm.node.cli import main

if __name__ == "__main__":
    main()
