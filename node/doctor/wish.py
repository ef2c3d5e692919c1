"""How a node would join, for the doctor."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wish:
    """How a node would join: its ``device``, and the places and modules that its operator allows. None: as before. ``reads``:
    whether to read the run's data and model, which may take long."""

    device: str
    places: tuple[str, ...] | None = None
    modules: tuple[str, ...] | None = None
    reads: bool = True
