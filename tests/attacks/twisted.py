"""The node's command with one twist: ``python -m tests.attacks.twisted TWIST join ...``. The process acts like any node, except
in its messages to the coordinator, or in the tensors that it gives its peers."""

from __future__ import annotations

import asyncio
import copy
import itertools
import math
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import grpc.aio
import torch

from dtfm.coordinator.core.audits import COMPARED
from dtfm.kernels.codec import Codec, Encoded
from dtfm.node import cli
from dtfm.node.model.bucket import Bucket, BucketSpec
from dtfm.node.model.loss import Scored
from dtfm.node.model.optimizer import optimizer
from dtfm.node.model.stage import Stage
from dtfm.node.session import Session
from dtfm.node.state.images import Images
from dtfm.node.state.snapshot_files import file_header
from dtfm.node.state.snapshot_writer import SnapshotWriter
from dtfm.node.state.state_store import Donation, StateStore
from dtfm.node.training.audits import round_again
from dtfm.node.training.audits.step_again import do_again
from dtfm.node.training.generation import Generation
from dtfm.node.training.reduction import bucket_sum, reducer
from dtfm.node.training.reduction.bucket_sum import BucketSum
from dtfm.node.training.reduction.reducer import Reduction
from dtfm.node.training.step import pipeline
from dtfm.node.training.step.outgoing import Outgoing
from dtfm.node.transport.kept import Kept, Tensor
from dtfm.node.transport.sender import Sender, What
from dtfm.protos.control_pb2 import (
    Audit,
    Audited,
    Moved,
    NodeMessage,
    PlanFailed,
    StepFailed,
    StepProblem,
    StepReady,
)
from dtfm.protos.frame import Header, Kind, frames
from dtfm.protos.outer import OuterStep
from dtfm.protos.peer_pb2 import KeptRequest
from dtfm.protos.plan_pb2 import Run
from dtfm.protos.streams import NODE_METADATA, method

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


def as_it_is(message: NodeMessage) -> Iterator[NodeMessage]:
    yield message


def too_many_samples(vote: StepReady) -> None:
    vote.samples += 2


def another_digest(vote: StepReady) -> None:
    vote.state_digest = bytes(32)


def another_norm(vote: StepReady) -> None:
    vote.squared_gradient_norm *= 1.01


def huge_norm(vote: StepReady) -> None:
    """Reports a norm that would multiply everybody's gradients by 1e-12."""
    vote.squared_gradient_norm = 1e24


def nan(vote: StepReady) -> None:
    vote.loss_sum = math.nan


def huge_loss(vote: StepReady) -> None:
    vote.loss_sum = 1.7e308


def flatters(vote: StepReady) -> None:
    """Reports losses that are too small, with a sum that agrees."""
    vote.loss_sum *= 0.9
    vote.losses[:] = [0.9 * loss for loss in vote.losses]


def denies(vote: StepReady) -> None:
    """It commits to other tensors than it has sent."""
    for passed in vote.sent:
        passed.digests = bytes(255 - byte for byte in passed.digests)


def denies_one(vote: StepReady) -> None:
    """It commits to other tensors than it has sent to the first of the PEERS."""
    for passed in vote.sent:
        if passed.peer == PEERS[0]:
            passed.digests = bytes(255 - byte for byte in passed.digests)


def accuses(message: NodeMessage) -> Iterator[NodeMessage]:
    """Finds all work wrong that it audits."""
    if message.HasField("audited"):
        answer = message.audited
        for kind in COMPARED:
            setattr(answer, kind, 1.0 if getattr(answer, kind) >= 0 else -1.0)
    yield message


def lies_in_evaluations(message: NodeMessage) -> Iterator[NodeMessage]:
    """It reports half the held-out loss."""
    if message.HasField("evaluated"):
        message.evaluated.losses[:] = [0.5 * loss for loss in message.evaluated.losses]
    yield message


def no_plan_suits(message: NodeMessage) -> Iterator[NodeMessage]:
    if message.HasField("plan_ready"):
        failed = PlanFailed(generation=message.plan_ready.generation, problem="it does not want to")
        message = NodeMessage(plan_failed=failed)
    yield message


_turns = itertools.cycle(PEERS)


def loses_peers(message: NodeMessage) -> Iterator[NodeMessage]:
    """Says of one peer after the other that it has lost it."""
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
    """An idle node that sends messages that nobody asked for with each heartbeat."""
    yield message
    if message.HasField("heartbeat"):
        for step, generation in itertools.product(range(1, 9), range(1, 5)):
            yield NodeMessage(plan_failed=PlanFailed(generation=generation, problem="no"))
            yield NodeMessage(step_failed=StepFailed(generation=generation, step=step, problem=StepProblem.NON_FINITE))
            yield NodeMessage(step_ready=StepReady(generation=generation, step=step, state_digest=bytes(32)))
            yield NodeMessage(moved=Moved(step=step, problem="no room"))
            yield NodeMessage(moved=Moved(step=step, problem="no room", in_checkpoint=True))


TWISTS: dict[str, Twist] = {
    "too_many_samples": votes(too_many_samples),
    "another_digest": votes(another_digest),
    "another_norm": votes(another_norm),
    "huge_norm": votes(huge_norm, since=1),
    "nan": votes(nan),
    "huge_loss": votes(huge_loss),
    "no_plan_suits": no_plan_suits,
    "loses_peers": loses_peers,
    "votes_for_nothing": votes_for_nothing,
    "meddles": meddles,
    "flatters": votes(flatters, since=1),
    "denies": votes(denies, since=1),
    "denies_one": votes(denies_one),
    "accuses": accuses,
    "lies_in_evaluations": lies_in_evaluations,
}
"""By name; a node with a twist of LIES says what it would say without."""


@contextmanager
def spoiled() -> Iterator[None]:
    """Inside, the gradients of this process are NaN, and so are the parts that others get. The losses are finite, and it says
    that all is well."""
    loss = Stage.loss

    def nan_gradients(*inputs: Any) -> Scored:
        scored = loss(*inputs)
        return replace(scored, weighted=scored.weighted * math.nan)

    def all_is_well(tensor: torch.Tensor) -> torch.Tensor:
        return torch.tensor(True)

    with (
        mock.patch.object(Stage, "loss", nan_gradients),
        mock.patch.object(pipeline, "is_finite", all_is_well),
        mock.patch.object(reducer, "is_finite", all_is_well),
        mock.patch.object(bucket_sum, "is_finite", all_is_well),
        mock.patch.object(Generation, "_counted_norm", return_value=1.0),
    ):
        yield


Change = Callable[[torch.Tensor], torch.Tensor]


@contextmanager
def adding(change: Change) -> Iterator[None]:
    """Inside, this process changes the gradients that it adds to the other replicas'."""
    make_final = Reduction._make_final

    def changed(self: Reduction, bucket: BucketSum) -> None:
        bucket.gradients.copy_(change(bucket.gradients))
        make_final(self, bucket)

    with mock.patch.object(Reduction, "_make_final", changed):
        yield


@contextmanager
def adding_up_wrong() -> Iterator[None]:
    """Inside, this process turns the sign of the sums that it makes of all replicas' gradients."""
    add_up = BucketSum.add_up

    def turned(self: BucketSum, number: int, *rest: Any) -> None:
        add_up(self, number, *rest)
        self.piece(number).neg_()

    with mock.patch.object(BucketSum, "add_up", turned):
        yield


@contextmanager
def giving_wrong_state() -> Iterator[None]:
    """Inside, one bit is flipped in each bucket that this process gives others."""
    donation = StateStore._donation

    def flipped(piece: memoryview) -> memoryview:
        data = bytearray(piece)
        data[len(data) // 2] ^= 1
        return memoryview(data)

    def wrong(self: StateStore, bucket: int, offset: int, generation: int, *, outlasts: bool, shared: bool) -> Donation:
        header, pieces = donation(self, bucket, offset, generation, outlasts=outlasts, shared=shared)
        return header, map(flipped, pieces)

    with mock.patch.object(StateStore, "_donation", wrong):
        yield


@contextmanager
def writing_wrong_state() -> Iterator[None]:
    """Inside, this process writes other state into snapshots, from step 30 on, and gives the right digests of the files."""
    write = SnapshotWriter.write

    def flipped(self: SnapshotWriter, step: int, buckets: Collection[Bucket], images: Images) -> None:
        written = [copy.deepcopy(bucket) for bucket in buckets]
        for bucket in written if step >= 30 else ():
            bucket.moments[0].view(torch.uint8)[0] ^= 1
        write(self, step, written, images)

    with mock.patch.object(SnapshotWriter, "write", flipped):
        yield


@contextmanager
def renaming() -> Iterator[None]:
    """Inside, this process exchanges the names of two parameters of one shape, where there are two, in each file that it
    writes. It gives the right digests of the files and of the state."""

    def renamed(spec: BucketSpec, dtype: torch.dtype) -> bytes:
        pairs = itertools.combinations(enumerate(spec.parameters), 2)
        for (i, (one, shape)), (j, (other, same)) in pairs:
            if shape == same:
                parameters = list(spec.parameters)
                parameters[i], parameters[j] = (other, shape), (one, shape)
                return file_header(replace(spec, parameters=tuple(parameters)), dtype)
        return file_header(spec, dtype)

    with mock.patch("dtfm.node.state.snapshot_writer.file_header", renamed):
        yield


@contextmanager
def passing_on(change: Change, kind: Kind = Kind.ACTIVATION) -> Iterator[None]:
    """Inside, this process changes the tensors that it passes on to the next stage, or with GRADIENT to the one before."""
    hand_on = Outgoing.hand_on

    def changed(self: Outgoing, of: Kind, destination: str, number: int, tensor: torch.Tensor) -> None:
        hand_on(self, of, destination, number, change(tensor) if of is kind else tensor)

    with mock.patch.object(Outgoing, "hand_on", changed):
        yield


@contextmanager
def misevaluating() -> Iterator[None]:
    """Inside, this process halves the activations of held-out samples that it passes on to the next stage."""
    encode = Sender.encode

    def changed(self: Sender, what: What, tensor: torch.Tensor, codec: Codec) -> Future[Encoded]:
        return encode(self, what, tensor / 2 if what.kind is Kind.EVALUATION else tensor, codec)

    with mock.patch.object(Sender, "encode", changed):
        yield


@contextmanager
def dying_at_the_end() -> Iterator[None]:
    """Inside, this process dies when it is to evaluate after the last step."""
    evaluate = Generation.evaluate

    def dies(self: Generation, step: int) -> tuple[float, ...]:
        if step == self.run.train.steps:
            os.kill(os.getpid(), signal.SIGKILL)
        return evaluate(self, step)

    with mock.patch.object(Generation, "evaluate", dies):
        yield


@contextmanager
def mislabelled() -> Iterator[None]:
    """Inside, this process trains on the labels in their reverse order. It evaluates, and audits others, as it should."""
    loss, train_again, audits = Stage.loss, round_again._train, list[bool]()

    def reversed_labels(self: Stage, x: torch.Tensor, labels: torch.Tensor, *rest: Any) -> Scored:
        _weight, _positions, only, *_ = rest  # an audit names the parameters whose gradients it wants
        trains = torch.is_grad_enabled() and only is None and not audits
        return loss(self, x, labels.flip(-1) if trains else labels, *rest)

    def audited(*step: Any) -> None:
        audits.append(True)
        train_again(*step)
        audits.clear()

    with mock.patch.object(Stage, "loss", reversed_labels), mock.patch.object(round_again, "_train", audited):
        yield


@contextmanager
def learning_too_fast() -> Iterator[None]:
    """Inside, this process learns at three times the rate. It audits others as it should."""
    update = optimizer.inner_step

    def faster(train: Run.Train, step: int, terms: optimizer.Terms, *rest: Any) -> None:
        update(train, step, replace(terms, learning_rate=3 * terms.learning_rate), *rest)

    with mock.patch("dtfm.node.training.generation.inner_step", faster):
        yield


@contextmanager
def withheld() -> Iterator[None]:
    """Inside, this process hands out nothing for audits."""

    def find(*_: object) -> Tensor:
        raise LookupError("NOT_KEPT: so it says")

    with mock.patch.object(Kept, "find", find):
        yield


GONE = "it leaves, as it is asked for what it sent"
"""In the standard error of who leaves when it is caught."""


@contextmanager
def leaving_when_caught() -> Iterator[None]:
    """Inside, this process turns the sign of the gradients that it adds. When its auditor asks for them (for several pieces,
    where auditors of others ask for one), it closes its control stream, and answers nothing before that has ended. It comes
    back under the same key."""
    messages, connect, look_up = Session._messages, Session._connect_once, Kept.find
    asked: dict[tuple[str, int, int], set[int]] = {}
    last, ended, sessions = NodeMessage(), threading.Event(), list[tuple[asyncio.AbstractEventLoop, Session]]()

    async def until_caught(
        session: Session, outgoing: asyncio.Queue[NodeMessage | None], let_in: asyncio.Event
    ) -> AsyncIterator[NodeMessage]:
        sessions[:] = [(asyncio.get_running_loop(), session)]
        ended.clear()
        async for message in messages(session, outgoing, let_in):
            if message is last:
                return  # this closes the stream
            yield message

    async def connected_once(session: Session) -> tuple[str, bool]:
        outcome = await connect(session)
        ended.set()
        return outcome

    def find(kept: Kept, caller: str, request: KeptRequest) -> Tensor:
        pieces = asked.setdefault((caller, request.generation, request.step), set())
        pieces.add(request.part)
        if len(pieces) == 1:
            return look_up(kept, caller, request)
        ((loop, session),) = sessions
        print(GONE, file=sys.stderr, flush=True)
        loop.call_soon_threadsafe(session._outgoing.put_nowait, last)
        ended.wait(60)
        raise LookupError("NOTHING_KEPT: this node has not voted, or the step is over")

    with (
        adding(lambda mine: -mine),
        mock.patch.object(Session, "_messages", until_caught),
        mock.patch.object(Session, "_connect_once", connected_once),
        mock.patch.object(Kept, "find", find),
    ):
        yield


@contextmanager
def flipped_and_withheld() -> Iterator[None]:
    """Inside, this process turns the sign of the gradients that it adds, and hands out nothing for audits."""
    with adding(lambda mine: -mine), withheld():
        yield


def noise(like: torch.Tensor) -> torch.Tensor:
    """Of the usual size."""
    return torch.randn_like(like) * like.square().mean().sqrt()


def first_again() -> Change:
    """What was passed on first."""
    first: list[torch.Tensor] = []

    def again(tensor: torch.Tensor) -> torch.Tensor:
        if not first or first[0].shape != tensor.shape:
            first[:] = [tensor]
        return first[0]

    return again


FORGED = "of a forged frame it was said: "
"""Followed by what the peer has answered, in the standard error of who forges."""


@contextmanager
def forging() -> Iterator[None]:
    """Inside, this process sends its neighbours two more frames for each tensor, on streams of their own. One frame pretends to
    come from the stage on their other side, and one has another node's name."""
    given, turn = Sender.send, asyncio.Lock()
    turned = {Kind.ACTIVATION: Kind.GRADIENT, Kind.GRADIENT: Kind.ACTIVATION}

    async def send(sender: Sender, peer: str, name: str, header: Header, data: memoryview) -> None:
        async with turn:
            call = method(sender._channels[peer], "Tensors")(metadata=((NODE_METADATA, name),))
            with suppress(grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
                await call.write(next(frames(header, data)))
                await call.done_writing()
            print(FORGED + (await call).decode(), file=sys.stderr, flush=True)

    def forge(self: Sender, destination: str, what: What, encoded: Future[Encoded]) -> None:
        given(self, destination, what, encoded)
        if what.kind in turned:
            encoded.add_done_callback(partial(also, self, destination, what))

    def also(sender: Sender, destination: str, what: What, encoded: Future[Encoded]) -> None:
        data = memoryview(bytes(encoded.result().data))
        for kind, name in ((turned[what.kind], sender._node), (what.kind, "another")):
            header = replace(what, kind=kind).header(encoded.result())
            asyncio.run_coroutine_threadsafe(send(sender, destination, name, header, data), sender._loop)

    with mock.patch.object(Sender, "send", forge):
        yield


FRIENDS = ("poisoner", "accomplice")
"""Those who lie for each other."""


@contextmanager
def drifting() -> Iterator[None]:
    """Flips a bit of its momentum of exchanges, as faulty memory would."""
    step = optimizer.outer_step

    def drifted(outer: OuterStep, bucket: Bucket, change: torch.Tensor) -> None:
        step(outer, bucket, change)
        bucket.shared[1].view(torch.uint8)[0] ^= 1

    with mock.patch("dtfm.node.training.generation.outer_step", drifted):
        yield


@contextmanager
def covering() -> Iterator[None]:
    """Inside, this process finds all work of its friends right, and audits others as it should. (Nobody tells it the accuser of
    a friend, so it cannot take revenge.)"""

    def right(audit: Audit, *rest: Any) -> Audited:
        if audit.node not in FRIENDS:
            return do_again(audit, *rest)
        return Audited(number=audit.number, activations=0, gradients=0, addends=0, losses=0)

    with mock.patch("dtfm.node.training.audits.auditing.do_again", right):
        yield


LIES: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "spoils": spoiled,
    "poisons": lambda: adding(lambda mine: mine * -30),
    "flips": lambda: adding(lambda mine: -mine),
    "exaggerates": lambda: adding(lambda mine: mine * 30),
    "adds_noise": lambda: adding(noise),
    "adds_too_much": lambda: adding(lambda mine: mine * 1.05),
    "adds_up_wrong": adding_up_wrong,
    "biased_forward": lambda: passing_on(lambda mine: mine * 1.05),
    "biased_back": lambda: passing_on(lambda mine: mine * 1.05, Kind.GRADIENT),
    "noisy": lambda: passing_on(noise),
    "sends_zeros": lambda: passing_on(torch.zeros_like),
    "repeats": lambda: passing_on(first_again()),
    "mislabels": mislabelled,
    "learns_too_fast": learning_too_fast,
    "misevaluates": misevaluating,
    "dies_at_the_end": dying_at_the_end,
    "withholds": withheld,
    "flips_and_withholds": flipped_and_withheld,
    "flips_and_leaves": leaving_when_caught,
    "gives_wrong_state": giving_wrong_state,
    "writes_wrong_state": writing_wrong_state,
    "renames": renaming,
    "forges": forging,
    "covers": covering,
    "drifts": drifting,
}
"""By name, the context in which a node runs that lies to its peers. Several are given as one, with plus signs in between."""


def main() -> None:
    names = sys.argv.pop(1).split("+")
    twist = next((TWISTS[name] for name in names if name in TWISTS), as_it_is)
    send = Session._send

    def twisted(session: Session, message: NodeMessage) -> None:
        for said in twist(message):
            send(session, said)

    with mock.patch.object(Session, "_send", twisted), ExitStack() as lies:
        for name in names:
            lies.enter_context(LIES.get(name, nullcontext)())
        cli.main()


if __name__ == "__main__":
    main()
