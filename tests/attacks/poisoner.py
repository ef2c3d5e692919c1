"""A node that adds its gradients to its replicas' so many times over: ``python -m tests.attacks.poisoner FACTOR join ...``."""

from __future__ import annotations

import sys

from dtfm.node import cli
from dtfm.node.training import reduction


def main() -> None:
    factor = float(sys.argv.pop(1))
    honest = reduction._Reduction._make_final

    def poisoned(self: reduction._Reduction, bucket: reduction._Bucket) -> None:
        bucket.gradients.mul_(factor)
        honest(self, bucket)

    reduction._Reduction._make_final = poisoned  # type: ignore[method-assign]
    cli.main()


if __name__ == "__main__":
    main()
