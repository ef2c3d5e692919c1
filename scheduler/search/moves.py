"""Moves: small random changes to a position, mostly where a step's time is decided.

Every move returns whether it changed the position. When it returns False the position may be half changed: the walk throws it
away.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dtfm.scheduler.cost.state_transfer import Fetching
from dtfm.scheduler.model.compiled import compiled, entry
from dtfm.scheduler.model.problem import Ints
from dtfm.scheduler.model.sketch import Position

NEAR = 8
"""Moves choose among this many nearest nodes of a node."""


class Rules(NamedTuple):
    """The limits of moves."""

    nearest: Ints
    """int64 [nodes, nodes - 1]: each node's others by the time of an exchange."""
    most_stages: int
    """The largest number of stages."""
    free_stages: bool
    """False: the number of stages stays."""
    free_sizes: bool
    """False: the number of replicas of each stage stays."""
    fetching: Fetching
    """The price of state transfer."""
    equal_sizes: bool = False
    """All stages have the same number of replicas. So stages may change places although their sizes stay."""
    free_cuts: bool = True
    """False: the cuts stay."""


@entry()
def change(rules: Rules, position: Position, decides: Ints) -> bool:
    """One random move. ``decides`` is Sketch.decides of the position before it."""
    kind = np.random.random()
    if kind < 0.2:
        return rules.free_cuts and _shift_cut(position, decides)
    if kind < 0.65:
        if kind < 0.35 or not rules.free_sizes:
            return _swap(rules, position, decides)
        return _relocate(rules, position, decides)
    if kind < 0.85:
        return _swap(rules, position, decides)
    if kind < 0.92:
        return _reorder(rules, position)
    if not rules.free_stages:
        return False
    if kind < 0.945:
        return _found_stage(rules, position)
    if kind < 0.97:
        return _split_stage(rules, position)
    if kind < 0.985:
        return _dissolve_stage(rules, position)
    return _merge_stages(position)


@compiled()
def _chance(probability: float) -> bool:
    return np.random.random() < probability


@compiled()
def _member(place: Ints, stage: int) -> int:
    """A random node of the stage (-1: idle), or -1 when it has none."""
    count = 0
    for node in range(len(place)):
        if place[node] == stage:
            count += 1
    if count == 0:
        return -1
    nth = np.random.randint(0, count)
    for node in range(len(place)):
        if place[node] == stage:
            if nth == 0:
                return node
            nth -= 1
    return -1


@compiled()
def _aim(place: Ints, decides: Ints) -> int:
    """A node that decides, a node of a stage that decides, or any node."""
    kind = np.random.random()
    node = -1
    if kind < 0.15:
        node = decides[0]
    elif kind < 0.25:
        node = decides[1]
    elif kind < 0.35:
        node = decides[3]
    elif kind < 0.4:
        node = decides[4]
    elif kind < 0.5:
        node = _member(place, decides[2])
    elif kind < 0.55:
        node = _member(place, decides[5])
    return node if node >= 0 else np.random.randint(0, len(place))


@compiled()
def _deciding_stage(decides: Ints) -> int:
    return int(decides[2] if _chance(0.5) else decides[5])


@compiled()
def _near(rules: Rules, node: int) -> int:
    """One of the nearest nodes; the node itself if there is no other."""
    if rules.nearest.shape[1] == 0:
        return node
    return int(rules.nearest[node, np.random.randint(0, min(NEAR, rules.nearest.shape[1]))])


@compiled()
def _shift(cuts: Ints, boundary: int, by: int) -> bool:
    """Shifts one cut by this many layers, unless a stage would be left without any."""
    shifted = cuts[boundary] + by
    if not cuts[boundary - 1] < shifted < cuts[boundary + 1]:
        return False
    cuts[boundary] = shifted
    return True


@compiled()
def _shift_cut(position: Position, decides: Ints) -> bool:
    """Shifts a cut. Half of the time a deciding stage gets smaller. Sometimes the neighbouring cut shifts too."""
    stages = position.stages[0]
    if stages < 2:
        return False
    if _chance(0.5):
        stage = _deciding_stage(decides)
        boundary, by = (stage, 1) if _chance(0.5) else (stage + 1, -1)
        if not 1 <= boundary < stages:
            return False
    else:
        boundary, by = np.random.randint(1, stages), 1 if _chance(0.5) else -1
    if _chance(0.3):
        by *= np.random.randint(1, 4)
    if not _shift(position.cuts, boundary, by):
        return False
    if _chance(0.3):
        beside = boundary + (1 if _chance(0.5) else -1)
        if 1 <= beside < stages:
            _shift(position.cuts, beside, by)
    return True


@compiled()
def _relocate(rules: Rules, position: Position, decides: Ints) -> bool:
    """Moves a node to another stage, or makes it idle. The stage is a near node's, a neighbour of a near node's, a deciding
    one, or any."""
    place, stages = position.place, position.stages[0]
    node = _aim(place, decides)
    old = place[node]
    kind = np.random.random()
    if kind < 0.15:
        new = -1
    elif kind < 0.5:
        new = place[_near(rules, node)]
        if new >= 0 and _chance(0.5):
            new += 1 if _chance(0.5) else -1
            if new >= stages:
                return False
    elif kind < 0.6:
        new = _deciding_stage(decides)
        if new >= stages:
            return False
    else:
        new = np.random.randint(0, stages)
    if new == old:
        return False
    place[node] = new
    if old >= 0 and _member(place, old) < 0:
        return rules.free_stages and stages > 1 and _close_stage(position, old)
    if old >= 0 and new >= 0 and abs(new - old) == 1 and _chance(0.3):
        _shift(position.cuts, max(old, new), 1 if new < old else -1)
    return True


@compiled()
def _swap(rules: Rules, position: Position, decides: Ints) -> bool:
    """Swaps the places of two nodes; one may be idle."""
    place = position.place
    if len(place) < 2:
        return False
    one = _aim(place, decides)
    other = _near(rules, one) if _chance(0.4) else np.random.randint(0, len(place))
    if place[one] == place[other]:
        other = np.random.randint(0, len(place))
    if place[one] == place[other]:
        return False
    place[one], place[other] = place[other], place[one]
    return True


@compiled()
def _reorder(rules: Rules, position: Position) -> bool:
    """Swaps two stages' nodes, reverses a segment of stages, or moves a stage; their cuts stay in place."""
    place, stages = position.place, position.stages[0]
    if stages < 2 or not (rules.free_sizes or rules.equal_sizes):
        return False
    one, other = np.random.randint(0, stages), np.random.randint(0, stages)
    if one == other:
        return False
    kind = np.random.random()
    low, high = min(one, other), max(one, other)
    for node in range(len(place)):
        stage = place[node]
        if kind < 0.5:
            if stage == one:
                place[node] = other
            elif stage == other:
                place[node] = one
        elif kind < 0.75:
            if low <= stage <= high:
                place[node] = low + high - stage
        elif stage == one:
            place[node] = other
        elif one < stage <= other:
            place[node] = stage - 1
        elif other <= stage < one:
            place[node] = stage + 1
    return True


@compiled()
def _open_stage(position: Position, stage: int, cut: int) -> None:
    """Makes room for a stage at this number. The stage with the number so far is cut at ``cut``."""
    stages = position.stages[0]
    for node in range(len(position.place)):
        if position.place[node] >= stage:
            position.place[node] += 1
    for boundary in range(stages, stage - 1, -1):
        position.cuts[boundary + 1] = position.cuts[boundary]
    position.cuts[stage] = cut
    position.stages[0] = stages + 1


@compiled()
def _close_stage(position: Position, stage: int) -> bool:
    """Takes a stage without nodes out. Its layers go to a neighbouring stage."""
    stages = position.stages[0]
    for node in range(len(position.place)):
        if position.place[node] > stage:
            position.place[node] -= 1
    boundary = stage + np.random.randint(0, 2)
    boundary = min(max(boundary, 1), stages - 1)
    for later in range(boundary, stages):
        position.cuts[later] = position.cuts[later + 1]
    position.stages[0] = stages - 1
    return True


@compiled()
def _found_stage(rules: Rules, position: Position) -> bool:
    """A new stage of one node, idle if there is one, and perhaps some idle nodes near it. The caller makes new cuts."""
    place, stages = position.place, position.stages[0]
    if stages == rules.most_stages:
        return False
    node = _member(place, -1) if _chance(0.6) else -1
    if node < 0:
        node = np.random.randint(0, len(place))
    stage = np.random.randint(0, stages + 1)
    _open_stage(position, stage, position.cuts[stage])
    old = place[node]
    place[node] = stage
    if _chance(0.5):
        for nth in range(min(np.random.randint(0, 4), rules.nearest.shape[1])):
            near = rules.nearest[node, nth]
            if place[near] == -1:
                place[near] = stage
    return old < 0 or _member(place, old) >= 0


@compiled()
def _split_stage(rules: Rules, position: Position) -> bool:
    """Splits a stage's layers and nodes in two, nodes near each other together half of the time."""
    place, stages = position.place, position.stages[0]
    stage = np.random.randint(0, stages)
    layers = position.cuts[stage + 1] - position.cuts[stage]
    size = 0
    for node in range(len(place)):
        if place[node] == stage:
            size += 1
    if stages == rules.most_stages or layers < 2 or size < 2:
        return False
    _open_stage(position, stage + 1, position.cuts[stage] + np.random.randint(1, layers))
    half = size // 2 if _chance(0.5) else np.random.randint(1, size)
    first = _member(place, stage)
    place[first] = stage + 1
    moved = 1
    if _chance(0.5):
        for near in rules.nearest[first]:
            if moved < half and place[near] == stage:
                place[near] = stage + 1
                moved += 1
    while moved < half:
        place[_member(place, stage)] = stage + 1
        moved += 1
    return True


@compiled()
def _dissolve_stage(rules: Rules, position: Position) -> bool:
    """Takes a stage out; its nodes become idle, or most of them join stages of nodes near them."""
    place, stages = position.place, position.stages[0]
    if stages < 2:
        return False
    stage = np.random.randint(0, stages)
    kept = _chance(0.7)
    for node in range(len(place)):
        if place[node] == stage:
            near = place[_near(rules, node)]
            place[node] = near if kept and near != stage else -1
    return _close_stage(position, stage)


@compiled()
def _merge_stages(position: Position) -> bool:
    """Makes one stage of two neighbouring ones."""
    place, stages = position.place, position.stages[0]
    if stages < 2:
        return False
    stage = np.random.randint(0, stages - 1)
    for node in range(len(place)):
        if place[node] > stage:
            place[node] -= 1
    for later in range(stage + 1, stages):
        position.cuts[later] = position.cuts[later + 1]
    position.stages[0] = stages - 1
    return True
