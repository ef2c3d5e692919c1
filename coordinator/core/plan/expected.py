"""The expected times of the plan in force: of a step, and of loading its state. Deadlines follow from them."""

from __future__ import annotations

from dtfm.coordinator.core.copies.availability import moved_bytes
from dtfm.coordinator.core.state.state import State

SLOWEST_DISK = 20e6
"""The least bytes per second that state comes from a disk or a checkpoint, or goes to a disk."""

SLOWEST_SOURCE = 3e6
"""The least bytes per second of frozen weights, as nodes keep them: a line of 100 Mbit/s, if they are published in 16 bits and
kept in 4."""


def step_seconds(state: State) -> float | None:
    """The planner's prediction for a step, or the time of the last step if that was longer. None: neither is known."""
    training = state.ledger.training
    known = [seconds for seconds in (training.predicted, training.step_seconds) if seconds is not None]
    return max(known, default=None)


def loading_seconds(state: State, node: str) -> float:
    """The seconds to load what the node lacks for its part: the state from the holder with the fastest link, or from a disk, and
    frozen weights from where they are published."""
    ledger = state.ledger
    plan, held = ledger.training.in_force, ledger.holders
    stage = plan.stages[plan.stage_of(node) or 0]
    lacking = [layer for layer in range(*stage.layers) if not held or node not in held[layer]]
    layers = ledger.description.workload.layers
    frozen = sum(layers[layer].frozen_bytes for layer in lacking) / SLOWEST_SOURCE
    if not lacking or ledger.training.step == 0:
        return frozen
    givers = {name for layer in lacking if held for name in held[layer]}
    links = ledger.reach.links
    rates = [link.bandwidth for name in givers if (link := links.get(name, {}).get(node)) is not None]
    size = sum(moved_bytes(state, (layer, layer + 1)) for layer in lacking)
    return frozen + size / max([SLOWEST_DISK if not givers else 1.0, *rates])
