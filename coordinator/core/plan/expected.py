"""The expected times of the plan in force: of a step, and of loading its state. Deadlines follow from them."""

from __future__ import annotations

from dtfm.coordinator.core.copies.availability import frozen_bytes, moved_bytes, parameter_bytes
from dtfm.coordinator.core.state.state import State

SLOWEST_DISK = 20e6
"""The least bytes per second that state comes from a disk or a checkpoint, or goes to a disk. Also of the parameters that a run
begins with, which are drawn, or read where they are published: a line of 100 Mbit/s, if they are published in 16 bits."""

SLOWEST_SOURCE = 3e6
"""The least bytes per second of frozen weights, as nodes keep them: a line of 100 Mbit/s, if they are published in 16 bits and
kept in 4."""


def step_seconds(state: State) -> float | None:
    """The planner's prediction for a step, or the time of the last step if that was longer. None: neither is known."""
    training = state.ledger.training
    known = [seconds for seconds in (training.predicted, training.step_seconds) if seconds is not None]
    return max(known, default=None)


def loading_seconds(state: State, node: str) -> float:
    """The seconds to load the layers that the node lacks for its part. State comes from the holder with the fastest link, or from
    a disk. Frozen weights come from their place."""
    return sum(_by_layer(state, node))


def longest_layer_seconds(state: State, node: str) -> float:
    """The same for the layer that takes longest. A node that loads reports progress after each layer at least."""
    return max(_by_layer(state, node), default=0.0)


def _by_layer(state: State, node: str) -> list[float]:
    """Of each layer that the node lacks, the seconds to load it."""
    ledger = state.ledger
    plan, held = ledger.training.in_force, ledger.holders
    stage = plan.stages[plan.stage_of(node) or 0]
    lacking = [layer for layer in range(*stage.layers) if not held or node not in held[layer]]
    givers = {name for layer in lacking if held for name in held[layer]}
    links, rate, size = ledger.reach.links, SLOWEST_DISK, moved_bytes
    if ledger.training.step == 0:
        size = parameter_bytes
    elif givers:
        rate = max([1.0, *(link.bandwidth for name in givers if (link := links.get(name, {}).get(node)) is not None)])
    each = [(layer, layer + 1) for layer in lacking]
    return [frozen_bytes(state, layer) / SLOWEST_SOURCE + size(state, layer) / rate for layer in each]
