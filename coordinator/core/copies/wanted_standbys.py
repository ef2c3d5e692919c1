"""Which nodes should copy which layers as standbys: by the machines that have them, the memory, and the links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dtfm.coordinator.core.copies.availability import frozen_bytes, moved_bytes, orthogonal_bytes, parameter_bytes
from dtfm.coordinator.core.copies.keeping_up import COMMIT_WAIT_FRACTION
from dtfm.coordinator.core.state.copies import Layers
from dtfm.coordinator.core.state.state import State
from dtfm.scheduler.model.memory import Keeping, OptimizerState
from dtfm.scheduler.model.plan import Plan, Stage
from dtfm.scheduler.model.workload import UPDATE_BYTES

FOLLOW_FRACTION = 0.5
"""A node becomes a standby only if its links from the donors carry a step's gradients in this fraction of a step. Over slower
links it is quicker to pause training for the state."""

UPDATE = {"auto": 0.15, "i4b64": 0.15, "raw16": 0.5, "topk": 1 / 16, "top64": 1 / 32}
"""By codec of exchanges, the bytes to a standby per byte of the exchange's sum (node/state/update.py). Under a sparse codec these
are the bytes for each island: the elements that it sends, 8 of 256 or 64 of 4,096, with their places."""

MOST_IDLE_STANDBYS = 2
"""The number of idle nodes that become standbys of one stage. Each takes a part of its replicas' uplinks."""


def wanted_standbys(state: State) -> Mapping[str, Layers]:
    """By node, the layers that it should copy as a standby.

    A node of the chosen plan copies the layers that it lacks. An idle node copies the stage whose replicas and standbys are on
    the fewest machines, preferably a stage that is not on its own machine. If a stage is still on one machine alone, a neighbour
    whose link is fast enough copies it."""
    plan, chosen = state.ledger.training.in_force, state.planner.chosen
    wanted = lacking(state, chosen.plan) if chosen is not None else {}
    if state.rounds.count:
        return wanted  # islands are copies of each other as of the last exchange, and no standby follows their steps
    party, holders = state.ledger.party, state.ledger.holders
    copies = {stage.layers: list(stage.replicas) for stage in plan.stages}
    most = {layers: len(replicas) + MOST_IDLE_STANDBYS for layers, replicas in copies.items()}
    on = {layers: set(map(party, replicas)) for layers, replicas in copies.items()}
    staying, trained = state.ledger.staying, {node: stage for stage in plan.stages for node in stage.replicas}
    for node in staying:
        if node in trained or node in wanted:
            continue
        at = party(node)
        order = sorted(
            (at in on[layers], len(on[layers]), len(copies[layers]), layers)
            for layers in copies
            if len(copies[layers]) < most[layers]
        )
        for *_, layers in order:
            if _has_room(state, node, layers, None) and _can_follow(state, holders, node, layers):
                wanted[node] = layers
                copies[layers].append(node)
                on[layers].add(at)
                break
    if chosen is None:
        free = {node: trained[node] for node in staying if node in trained and node not in wanted}
        for stage in plan.stages:
            if len(on[stage.layers]) == 1 and (neighbour := _neighbour(state, stage, free)):
                wanted[neighbour] = stage.layers
                del free[neighbour]
    return wanted


def _neighbour(state: State, stage: Stage, free: Mapping[str, Stage]) -> str:
    """The node that becomes a standby of ``stage`` beside its own work, or an empty name. The stage's replicas are on one
    machine.

    Of the nodes on other machines, picks the one with the fastest link from a replica. The link must carry a step's gradients in
    COMMIT_WAIT_FRACTION of a step, and half the node's memory must be enough for both. If there is no such node, a single replica
    may have its standby on its own machine. ``free``: the nodes that are no standbys yet, with the stages that they train.
    """
    ledger = state.ledger
    if ledger.training.step_seconds is None:
        return ""
    here = set(map(ledger.party, stage.replicas))
    slowest = _followed_bytes(state, stage.layers) / (COMMIT_WAIT_FRACTION * max(ledger.training.step_seconds, 1e-3))
    fastest: dict[str, float] = {}
    for replica in stage.replicas:
        for node, link in ledger.reach.links.get(replica, {}).items():
            if link.bandwidth >= slowest and node in free:
                fastest[node] = max(link.bandwidth, fastest.get(node, 0.0))
    candidates = []
    for node, bandwidth in fastest.items():
        beside = ledger.party(node) in here
        if free[node] is not stage and not (beside and len(stage.replicas) > 1):
            candidates.append((beside, -bandwidth, node))
    return next(
        (node for *_, node in sorted(candidates) if _has_room(state, node, stage.layers, free[node], fraction=0.5)), ""
    )


def _has_room(state: State, node: str, layers: Layers, trained: Stage | None, fraction: float = 1.0) -> bool:
    """Whether this fraction of the node's memory is enough for a copy of the layers beside the stage that it trains.

    Copies lie in the host's memory. If the device has its own memory, the copy lies beside the stage's state only if that is in
    the host's memory as well. The device of an idle node must have room too, at least for the state alone, since the node is to
    train the copy.
    """
    workload, size = state.ledger.description.workload, parameter_bytes(state, layers)
    workload, device = workload.with_rounds() if state.rounds.count else workload, state.ledger.members[node].device
    own = 0.0 if trained is None else parameter_bytes(state, trained.layers)
    matrices = orthogonal_bytes(state, layers)
    owned = 0.0 if trained is None else orthogonal_bytes(state, trained.layers)
    frozen = frozen_bytes(state, layers)
    outer = workload.for_exchanges_per_parameter_byte
    if device.host_memory_bytes == 0:
        frozen += 0.0 if trained is None else frozen_bytes(state, trained.layers)
        needed = workload.kept_on_device(own + size, owned + matrices) + (own + size) * outer + frozen
        return needed <= fraction * device.memory_bytes
    if trained is None and workload.least_on_device(size, matrices) + frozen > device.memory_bytes:
        return False
    keeping = trained.keeping[trained.replicas.index(node)] if trained is not None and trained.keeping else Keeping()
    is_here = keeping.optimizer_state is OptimizerState.DEVICE
    own = own * outer if is_here else workload.kept_on_host(own, owned)
    return own + copied_bytes(state, layers) <= fraction * device.host_memory_bytes


def copied_bytes(state: State, layers: Layers) -> float:
    """The bytes that a standby copies. With rounds it copies only the state that islands share."""
    if state.rounds.count:
        return parameter_bytes(state, layers) * state.ledger.description.workload.bytes_shared_per_parameter_byte
    return moved_bytes(state, layers)


def _followed_bytes(state: State, layers: Layers) -> float:
    """What a standby gets without a codec: in a step the gradients and Muon's updates, with rounds an exchange's sum."""
    updates = 0.0 if state.rounds.count else UPDATE_BYTES * orthogonal_bytes(state, layers)
    return parameter_bytes(state, layers) + updates


def lacking(state: State, plan: Plan) -> dict[str, Layers]:
    """By node, the layers that ``plan`` gives it, if it does not hold them and can copy them while others train.

    To copy them, it needs memory for them beside its present layers, and links that keep up. Nodes in Plan.frees_first do not
    have the memory. With rounds, only nodes of new islands copy: a replica in an island that goes on needs its moments, too."""
    holders, current = state.ledger.holders_in(None), state.ledger.training.in_force
    going_on = {stage.island for stage in current.stages} if state.rounds.count else ()
    trained = {node: stage for stage in current.stages for node in stage.replicas}
    return {
        node: stage.layers
        for stage in plan.stages
        for node in stage.replicas
        if holders
        and stage.island not in going_on
        and node not in plan.frees_first
        and any(node not in holders[layer] for layer in range(*stage.layers))
        and _has_room(state, node, stage.layers, trained.get(node))
        and _can_follow(state, holders, node, stage.layers)
    }


def _can_follow(state: State, holders: Sequence[tuple[str, ...]], node: str, layers: Layers) -> bool:
    """Whether the links from the donors carry a step's gradients in FOLLOW_FRACTION of a step, or an exchange's sum in this
    fraction of a round. True if that is not known. ``holders``: by layer, see Ledger, which looks at every member."""
    ledger, rounds = state.ledger, state.rounds
    share = FOLLOW_FRACTION * (rounds.length + 1)
    if rounds.count and (islands := len({*ledger.training.islands.values()})) > 1:
        network = state.run.network
        share /= min(1.0, UPDATE.get(network.exchange, 1.0) * (islands if network.exchanges_sparsely else 1))
    if not ledger.training.step_seconds or not holders:
        return True
    sizes: dict[tuple[str, ...], float] = {}
    for layer in range(*layers):
        donors = holders[layer]
        if node not in donors:
            sizes[donors] = sizes.get(donors, 0.0) + _followed_bytes(state, (layer, layer + 1))
    for donors, size in sizes.items():
        known = [
            ledger.reach.links[donor][node].bandwidth for donor in donors if node in ledger.reach.links.get(donor, {})
        ]
        if known and size > share * ledger.training.step_seconds * sum(known):
            return False
    return True
