"""The order in which gradients leave for the other replicas."""

from __future__ import annotations

from collections.abc import Iterable

from dtfm.node.model.bucket import BucketSpec


def sending_order(buckets: Iterable[BucketSpec]) -> list[int]:
    """The buckets' indices, as a backward pass finishes them; any two are in the same order on every node."""
    return [spec.index for spec in sorted(buckets, key=lambda spec: (-min(spec.layers), spec.index))]
