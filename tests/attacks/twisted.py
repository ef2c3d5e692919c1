"""The node's command with one twist: ``python -m tests.attacks.twisted TWIST join ...``. It does all that a node does, but for
what it tells the coordinator, or for the gradients and the state that it gives other replicas."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

from dtfm.node import cli
from dtfm.node.model.loss import Scored
from dtfm.node.model.stage import Stage
from dtfm.node.session import Session
from dtfm.node.state.state_store import StateStore, Tensor
from dtfm.node.training import reduction
from dtfm.protos.control_pb2 import (
    CHECKPOINT,
    DISKS,
    NodeMessage,
    PlanFailed,
    SnapshotParts,
    StepFailed,
    StepProblem,
    StepReady,
)

Twist = Callable[[NodeMessage], Iterable[NodeMessage]]
"""Makes of each message those that are sent in its place."""

FROM = 3
"""The step from which on a twist changes votes."""

PEERS = ("a", "b")
"""The honest ones. The twisted node is the one with another name."""


def votes(change: Callable[[StepReady], None], since: int = FROM) -> Twist:
    """Changes each vote from this step on."""

    def twist(message: NodeMessage) -> Iterator[NodeMessage]:
        if message.step_ready.step >= since:
            change(message.step_ready)
        yield message

    return twist


def too_many_samples(vote: StepReady) -> None:
    vote.samples += 2


def another_digest(vote: StepReady) -> None:
    vote.state_digest = bytes(32)


def another_norm(vote: StepReady) -> None:
    vote.squared_gradient_norm *= 1.01


def nan(vote: StepReady) -> None:
    vote.loss_sum = math.nan


def huge_loss(vote: StepReady) -> None:
    vote.loss_sum = 1.7e308


def pretends(vote: StepReady) -> None:
    """That all is well with its own gradients; see `spoiled`."""
    vote.squared_gradient_norm = 1.0


def no_plan_suits(message: NodeMessage) -> Iterator[NodeMessage]:
    if message.HasField("plan_ready"):
        failed = PlanFailed(generation=message.plan_ready.generation, problem="it does not want to")
        message = NodeMessage(plan_failed=failed)
    yield message


_turns = itertools.cycle(PEERS)


def loses_peers(message: NodeMessage) -> Iterator[NodeMessage]:
    """Takes turns with those that it says to have lost."""
    if message.step_ready.step >= FROM:
        vote, peer = message.step_ready, next(_turns)
        failed = StepFailed(generation=vote.generation, step=vote.step, problem=StepProblem.PEER_LOST, peer=peer)
        message = NodeMessage(step_failed=failed)
    yield message


def votes_for_nothing(message: NodeMessage) -> Iterator[NodeMessage]:
    """It trains, and its heartbeats come."""
    if message.step_ready.step < FROM:
        yield message


def meddles(message: NodeMessage) -> Iterator[NodeMessage]:
    """An idle node that says with each heartbeat what it is not asked."""
    yield message
    if message.HasField("heartbeat"):
        for step, generation in itertools.product(range(1, 9), range(1, 5)):
            yield NodeMessage(plan_failed=PlanFailed(generation=generation, problem="no"))
            yield NodeMessage(step_failed=StepFailed(generation=generation, step=step, problem=StepProblem.NON_FINITE))
            yield NodeMessage(step_ready=StepReady(generation=generation, step=step, state_digest=bytes(32)))
            for destination in (CHECKPOINT, DISKS):
                yield NodeMessage(snapshot_parts=SnapshotParts(step=step, destination=destination, problem="no room"))


TWISTS: dict[str, Twist] = {
    "too_many_samples": votes(too_many_samples),
    "another_digest": votes(another_digest),
    "another_norm": votes(another_norm),
    "nan": votes(nan),
    "huge_loss": votes(huge_loss),
    "spoils": votes(pretends, since=1),
    "poisons": votes(lambda _: None),
    "gives_wrong_state": votes(lambda _: None),
    "no_plan_suits": no_plan_suits,
    "loses_peers": loses_peers,
    "votes_for_nothing": votes_for_nothing,
    "meddles": meddles,
}


@contextmanager
def spoiled() -> Iterator[None]:
    """Inside, the gradients of this process are NaN, and so is what others get of them. The losses are not."""
    loss = Stage.loss

    def nan_gradients(*inputs: Any) -> Scored:
        scored = loss(*inputs)
        return replace(scored, weighted=scored.weighted * math.nan)

    with mock.patch.object(Stage, "loss", nan_gradients):
        yield


@contextmanager
def poisoned() -> Iterator[None]:
    """Inside, this process adds -30 times its gradients to the other replicas'."""
    make_final = reduction._Reduction._make_final

    def poison(self: reduction._Reduction, bucket: reduction._Bucket) -> None:
        bucket.gradients.mul_(-30)
        make_final(self, bucket)

    with mock.patch.object(reduction._Reduction, "_make_final", poison):
        yield


@contextmanager
def giving_wrong_state() -> Iterator[None]:
    """Inside, one bit is flipped in each bucket that this process gives others."""
    copy = StateStore._copy

    def flipped(self: StateStore, bucket: int, offset: int, generation: int) -> Tensor:
        header, state = copy(self, bucket, offset, generation)
        data = bytearray(state)
        data[len(data) // 2] ^= 1
        return header, memoryview(data)

    with mock.patch.object(StateStore, "_copy", flipped):
        yield


INSIDE = {"spoils": spoiled, "poisons": poisoned, "gives_wrong_state": giving_wrong_state}
"""By twist, the context in which such a node runs."""


def main() -> None:
    name = sys.argv.pop(1)
    twist = TWISTS[name]
    send = Session._send

    def twisted(session: Session, message: NodeMessage) -> None:
        for said in twist(message):
            send(session, said)

    with mock.patch.object(Session, "_send", twisted), INSIDE.get(name, nullcontext)():
        cli.main()


if __name__ == "__main__":
    main()
