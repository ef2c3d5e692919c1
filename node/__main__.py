"""``dtfm-node``, and ``python -m dtfm.node``: the command, or a sentence if what it needs is not installed."""

from __future__ import annotations

import sys

EXTRA = ("torch", "transformers", "safetensors")
"""What the extra "node" brings in."""


def main() -> None:
    try:
        from dtfm.node.cli import app
    except ModuleNotFoundError as missing:
        package = (missing.name or "").partition(".")[0]
        if package not in EXTRA:
            raise
        print(
            f"dtfm-node: {package} is not installed; a node needs more than the coordinator: pip install 'dtfm[node]' (with a "
            f"GPU 'dtfm[cuda13]' or 'dtfm[cuda12]', to match its driver)",
            file=sys.stderr,
        )
        raise SystemExit(2) from None
    app()


if __name__ == "__main__":
    main()
