"""Moves: who brings which buckets to their place, how long that may take, and who failed.

Snapshots and checkpoints say what is wanted, and which nodes can bring it. A bucket is on its way while a connected node was
asked for it, has not brought it, and is in time. So a node that leaves takes its moves with it, and nobody has to be told.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from dtfm.coordinator.core.state.copies import Move, Moves
from dtfm.coordinator.core.state.session import Session


def begun(moves: Moves, session: Session, buckets: Collection[int], due: float) -> Moves:
    """The moves, now that the node is asked for these buckets beside those that it brings already. None of them is due earlier
    than it was."""
    node, before = session.node, moves.of(session.node)
    due = max(due, moves.by_node[node].due) if before else due
    return replace(moves, by_node={**moves.by_node, node: Move(session.stream, before.union(buckets), due)})


def arrived(moves: Moves, node: str, buckets: Collection[int]) -> Moves:
    """The moves, now that the node has brought these buckets."""
    left = replace(moves.by_node[node], buckets=moves.of(node).difference(buckets))
    return replace(moves, by_node={**moves.by_node, node: left})


def failed(moves: Moves, node: str, problem: str) -> Moves:
    """The moves, now that the node cannot bring the rest of its buckets. It is not asked again."""
    moves = arrived(moves, node, moves.of(node)) if node in moves.by_node else moves
    return replace(moves, failed=moves.failed | {node}, problem=problem)


def followed(moves: Moves, sessions: Mapping[str, Session], now: float) -> Moves:
    """The moves of the nodes that are still connected and in time. Late nodes have failed."""
    here = {
        node: move for node, move in moves.by_node.items() if node in sessions and sessions[node].stream == move.stream
    }
    moves = replace(moves, by_node=here)
    late = [node for node, move in sorted(here.items()) if move.buckets and now > move.due]
    for node in late:
        moves = failed(moves, node, f"{', '.join(late)}: not in time")
    return moves
