"""A log's curves as the page has them, and as TensorBoard reads them from a folder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dtfm.coordinator.store.record import Record
from dtfm.coordinator.view.curves import reading
from dtfm.coordinator.view.so_far import SoFar

Curves = dict[str, list[tuple[int, float]]]
"""By figure: its step and value for each point."""


def curves_of(records: Iterable[Record]) -> Curves:
    so_far, curves = SoFar(), Curves()
    for record in records:
        so_far.add(record)
        if (figures := reading(so_far, record)) is not None:
            for name, value in figures.values.items():
                curves.setdefault(name, []).append((figures.step, value))
    return curves


def in_tensorboard(place: Path) -> Curves:
    """What TensorBoard shows of the only run there."""
    (folder,) = [each for each in place.iterdir() if each.is_dir()]
    read = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    read.Reload()
    return {tag: [(each.step, each.value) for each in read.Scalars(tag)] for tag in read.Tags()["scalars"]}
