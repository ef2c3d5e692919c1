"""The nodes that hold frozen layers, and the digests of these layers: a node that cannot read a layer's frozen weights from their
source gets them from such nodes.

A trusted run believes each member. Among strangers, two parties must name the same digest. If parties name different digests, the
one that most of them name counts. In a tie none counts, and the layer comes from its source alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from dtfm.coordinator.core.refusal import require
from dtfm.coordinator.core.state.state import State
from dtfm.coordinator.core.transition import Transition
from dtfm.coordinator.core.validation.votes import check_digest
from dtfm.protos import control_pb2 as wire

MOST_HOLDERS = 8
"""The most holders of a layer that nodes are told."""


def told(transition: Transition, node: str, layers: Collection[wire.FrozenLayer]) -> None:
    """Takes from a node of the plan which frozen layers it holds. Raises Refused."""
    plan = transition.state.ledger.training.in_force
    its_own = {layer for stage in plan.stages if node in stage.replicas for layer in range(*stage.layers)}
    named = [each.layer for each in layers]
    different = len(set(named)) == len(named) and its_own.issuperset(named)
    require(different, "frozen.layer", named[:20], "different layers of its stage")
    for each in layers:
        check_digest(each.digest, "frozen.digest")
    session = transition.state.members.sessions[node]
    transition.set_session(replace(session, frozen={each.layer: each.digest.hex() for each in layers}))


def offered(state: State, first: int = 0, past_last: int | None = None) -> Iterator[wire.FrozenLayer]:
    """The layers in [first, past_last) with a believed digest, each with its holders. ``past_last``: by default all layers."""
    holders: dict[int, dict[str, list[str]]] = {}
    for node, session in sorted(state.members.sessions.items()):
        for layer, digest in session.frozen.items():
            if first <= layer and (past_last is None or layer < past_last):
                holders.setdefault(layer, {}).setdefault(digest, []).append(node)
    for layer, by_digest in sorted(holders.items()):
        if (right := _believed(state, by_digest)) is not None:
            yield wire.FrozenLayer(layer=layer, digest=bytes.fromhex(right), nodes=_some(by_digest[right], layer))


def _believed(state: State, by_digest: dict[str, list[str]]) -> str | None:
    """The digest that counts. ``by_digest``: the nodes that name each digest."""
    needed = 1 if state.run.trust.mode == "trusted" else 2
    parties = {digest: len(set(map(state.ledger.party, nodes))) for digest, nodes in by_digest.items()}
    first, *others = sorted(parties, key=lambda digest: -parties[digest])
    is_tie = bool(others) and parties[others[0]] == parties[first]
    return None if parties[first] < needed or is_tie else first


def _some(nodes: list[str], layer: int) -> list[str]:
    """At most MOST_HOLDERS of the nodes: others for another layer."""
    begin = layer * MOST_HOLDERS % len(nodes)
    return sorted((nodes[begin:] + nodes[:begin])[:MOST_HOLDERS])
