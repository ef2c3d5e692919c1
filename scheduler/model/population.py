"""What a search keeps for the next one: good layouts that differ from each other, by the names of nodes."""

from __future__ import annotations

from dataclasses import dataclass

from dtfm.scheduler.model.plan import Plan


@dataclass(frozen=True, slots=True)
class Island:
    """Which nodes hold which layers of one copy of the model."""

    stages: tuple[tuple[str, ...], ...]
    """By stage, the names of its nodes."""
    cuts: tuple[int, ...]
    """Stage s has the layers [cuts[s], cuts[s + 1])."""


@dataclass(frozen=True, slots=True)
class Member:
    """A layout. Without rounds it has one island."""

    islands: tuple[Island, ...]

    @classmethod
    def of(cls, layout: Plan) -> Member:
        return cls(
            tuple(
                Island(
                    tuple(stage.replicas for stage in island.stages), (0, *(stage.layers[1] for stage in island.stages))
                )
                for island in layout.islands
            )
        )


Population = tuple[Member, ...]
"""The best member comes first."""
