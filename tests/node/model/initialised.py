"""Stages with their initial values, for tests and benchmarks."""

from __future__ import annotations

from dtfm.node.model.stage import Stage, initialise


def initialise_all(stage: Stage, seed: int) -> None:
    """Sets all buckets of the stage to their initial values."""
    for index, bucket in stage.buckets.items():
        initialise(stage.model, bucket, seed)
        stage.refresh(index)
