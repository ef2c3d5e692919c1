"""What a peer may send a node, over a real connection: the rest is refused by name and hurts nobody else."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest
import torch

from dtfm.node.model.bucket import Bucket, BucketSpec, bucket_bytes
from dtfm.node.model.placement import placement_of
from dtfm.node.network.bandwidth_probe import MOST_BYTES, receive_probe
from dtfm.node.network.dialling import Dialler
from dtfm.node.network.links import measure_links
from dtfm.node.state.recovery import fetch_states
from dtfm.node.state.state_store import HeldState, StateStore
from dtfm.node.training.failure import peer_of, problem_of
from dtfm.node.transport.callers import MOST_CALLS
from dtfm.node.transport.frame_validation import Expectations, TensorSizes
from dtfm.node.transport.peer_server import MOST_PING_BYTES, PeerServer
from dtfm.node.transport.receiver import Arrival, Receiver
from dtfm.node.transport.sender import Sender
from dtfm.protos.connection import REFUSED_BY_NAME_BYTES, open_channel, server_options
from dtfm.protos.control_pb2 import Peer, StepProblem
from dtfm.protos.frame import MAX_FRAME_BYTES, Header, Kind, frames
from dtfm.protos.identity.credentials import Identity, make_authority, make_key, peer_credentials, to_peer
from dtfm.protos.peer_pb2 import StandbyRequest, StateRequest
from dtfm.protos.streams import NODE_METADATA, handlers, method
from dtfm.scheduler.model.plan import Stage, from_routes
from tests.node.dialling import dialler
from tests.node.sending import activation, send
from tests.protos.members import DAY, NOW, member

GENERATION, STEP, ELEMENTS = 2, 1, 300_000  # two frames of fp32
# Micro-batches 0 and 2 come from a, 1 and 3 from b.
PLAN = from_routes(
    GENERATION,
    [Stage((0, 1), ("a", "b"), ()), Stage((1, 2), ("me",), ())],
    [(("a", "me"), 2), (("b", "me"), 2)],
)
SPEC = BucketSpec(3, (1,), (("weight", (500, 700)),))


async def at_once(_: float) -> None:
    pass


class Node:
    """A peer server, and the tensors that arrive."""

    def __init__(self) -> None:
        self.bucket = Bucket(SPEC, torch.device("cpu"), torch.float32)
        for tensor in self.bucket.state:
            tensor.normal_()
        self.arrived: asyncio.Queue[Arrival] = asyncio.Queue()
        self.store = StateStore()
        self.store.replace(HeldState(STEP, {SPEC.index: self.bucket}))
        self.server = PeerServer(self.store, at_once)
        self.server.become(member("me"))
        placement = placement_of(PLAN, "me", 0)
        assert placement is not None
        expect = Expectations(placement, TensorSizes(ELEMENTS, 0, {}, torch.float32, torch.float32))
        self.receiver = Receiver(expect, STEP - 1, self.arrived.put_nowait)
        self.address = ""


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    node = Node()
    node.address = f"127.0.0.1:{await node.server.start('127.0.0.1:0')}"
    node.server.deliver_to(node.receiver)
    yield node
    await node.server.stop()


def channel_to(node: Node, source: str = "a") -> grpc.aio.Channel:
    return open_channel(node.address, to_peer(member(source), "me"))


def named(source: str = "a") -> tuple[tuple[str, str]]:
    """The metadata of a tensor stream from ``source``."""
    return ((NODE_METADATA, source),)


def tensor_frames(*, generation: int = GENERATION, index: int = 0) -> list[bytes]:
    header = Header(Kind.ACTIVATION, 0, 1, generation, STEP, index, 0, ELEMENTS, ELEMENTS * 4)
    return list(frames(header, memoryview(bytes(ELEMENTS * 4))))


async def refusal(node: Node, sent: list[bytes], source: str = "a", claimed: str = "a") -> str:
    """The answer that the caller gets; its writes may meet the end of the call."""
    async with channel_to(node, source) as channel:
        call = method(channel, "Tensors")(metadata=named(claimed))
        with contextlib.suppress(grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            for message in sent:  # the call may end before all is written
                await call.write(message)
            await call.done_writing()
        answer: bytes = await call
        return answer.decode()


@pytest.mark.parametrize(
    ("sent", "name"),
    [
        (tensor_frames(generation=GENERATION + 1), "UNKNOWN_GENERATION"),
        ([bytes(MAX_FRAME_BYTES + 1)], "TOO_LARGE"),
        ([tensor_frames()[0][:-1]], "TRUNCATED"),
        ([tensor_frames()[0][:20]], "TRUNCATED"),
        ([b"GET / HTTP/1.1" + bytes(100)], "MALFORMED"),
        (tensor_frames(index=3), "UNEXPECTED"),
        (tensor_frames()[:1] * 2, "DUPLICATE"),
        (tensor_frames()[1:], "UNEXPECTED"),
    ],
)
async def test_a_bad_frame_ends_its_own_stream_only_and_is_named(node: Node, sent: list[bytes], name: str) -> None:
    assert (await refusal(node, sent)).startswith(f"{name}: ")

    lost: list[str] = []
    sender = Sender("b", lambda generation, error: lost.append(str(error)))
    await sender.connect(GENERATION, dialler("b"), {"me": node.address}, 20, 10)
    tensor = torch.randn(ELEMENTS)
    send(sender, "me", activation(GENERATION, STEP, 1), tensor)
    arrival = await asyncio.wait_for(node.arrived.get(), 20)
    await sender.close()
    assert (arrival.source, arrival.header.index) == ("b", 1)
    assert torch.equal(torch.frombuffer(bytearray(arrival.encoded), dtype=torch.float32), tensor)
    assert not lost


async def test_a_message_that_is_too_large_for_the_connection_is_refused_by_it(node: Node) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="RESOURCE_EXHAUSTED"):
        await refusal(node, [bytes(5 << 20)])


async def test_a_frame_of_an_earlier_generation_is_dropped_and_the_stream_goes_on(node: Node) -> None:
    async def messages() -> AsyncIterator[bytes]:
        for frame in (*tensor_frames(generation=GENERATION - 1), *tensor_frames()):
            yield frame

    async with channel_to(node) as channel:
        await method(channel, "Tensors")(messages(), metadata=named())
    assert node.arrived.qsize() == 1


async def test_a_member_that_takes_anothers_name_is_refused(node: Node) -> None:
    answer = await refusal(node, tensor_frames() * 20, source="b", claimed="a")
    assert answer == "CERTIFICATE: the caller's does not name 'a'"
    assert node.arrived.empty()


async def test_a_member_of_another_run_gets_no_answer(node: Node) -> None:
    """Not even if it trusts this run's nodes."""
    stranger = replace(member("a", make_authority(make_key(), NOW)), authority=member("a").authority)
    me = Peer(node="me", candidates=[node.address])
    report = await measure_links("a", [me], Dialler(stranger), 1)
    assert [link.bandwidth for link in report.links] == [0, 0]
    mine = Bucket(SPEC, torch.device("cpu"), torch.float32)
    with pytest.raises(ConnectionError, match="UNAVAILABLE"):
        await fetch_states([(mine, [me])], STEP, GENERATION, Dialler(stranger), 0.3)
    sender = Sender("a", lambda generation, error: None)
    with pytest.raises(ConnectionError, match="me: it cannot be reached"):
        await sender.connect(GENERATION, Dialler(stranger), {"me": node.address}, 1, 10)
    await sender.close()


async def test_channels_are_opened_again_when_the_coordinator_has_a_new_authority(node: Node) -> None:
    async def send_as(sender: Sender, identity: Identity, index: int) -> int:
        await sender.connect(GENERATION, Dialler(identity), {"me": node.address}, 20, 10)
        send(sender, "me", activation(GENERATION, STEP, index), torch.zeros(ELEMENTS))
        return (await asyncio.wait_for(node.arrived.get(), 20)).header.index

    sender = Sender("a", lambda generation, error: None)
    assert await send_as(sender, member("a"), 0) == 0
    authority = make_authority(make_key(), NOW)
    node.server.become(member("me", authority))
    assert await send_as(sender, member("a", authority), 2) == 2
    await sender.close()


async def test_a_sender_learns_that_it_was_refused(node: Node) -> None:
    lost: asyncio.Queue[Exception] = asyncio.Queue()
    sender = Sender("stranger", lambda generation, error: lost.put_nowait(error))
    await sender.connect(GENERATION, dialler("stranger"), {"me": node.address}, 20, 10)
    send(sender, "me", activation(GENERATION, STEP, 0), torch.zeros(ELEMENTS))
    error = await asyncio.wait_for(lost.get(), 20)
    await sender.close()
    assert (problem_of(error), peer_of(error)) == (StepProblem.PEER_LOST, "me")
    assert "UNEXPECTED" in str(error)
    assert "stranger" in str(error)


async def test_what_is_sent_after_a_stream_broke_arrives(node: Node) -> None:
    lost: asyncio.Queue[str] = asyncio.Queue()
    sender = Sender("a", lambda generation, error: lost.put_nowait(str(error)))
    await sender.connect(GENERATION, dialler("a"), {"me": node.address}, 20, 10)
    send(sender, "me", activation(GENERATION, STEP, 3), torch.zeros(ELEMENTS))  # b's to send
    assert "UNEXPECTED" in await asyncio.wait_for(lost.get(), 20)
    for index in (0, 2):
        send(sender, "me", activation(GENERATION, STEP, index), torch.zeros(ELEMENTS))
    arrived = [(await asyncio.wait_for(node.arrived.get(), 20)).header.index for _ in range(2)]
    await sender.close()
    assert arrived == [0, 2]


async def test_a_stream_that_broke_in_an_earlier_generation_loses_nothing_of_this_one(node: Node) -> None:
    lost: list[str] = []
    sender = Sender("a", lambda generation, error: lost.append(str(error)))
    await sender.connect(GENERATION + 1, dialler("a"), {"me": node.address}, 20, 10)
    send(sender, "me", activation(GENERATION + 1, STEP, 0), torch.zeros(ELEMENTS))
    await sender.connect(
        GENERATION, dialler("a"), {"me": node.address}, 20, 10
    )  # the queued tensor is of another generation
    send(sender, "me", activation(GENERATION, STEP, 2), torch.zeros(ELEMENTS))
    arrival = await asyncio.wait_for(node.arrived.get(), 20)
    await sender.close()
    assert (arrival.header.index, lost) == (2, [])


async def test_a_peer_that_cannot_be_reached_is_named_with_the_fix() -> None:
    sender = Sender("a", lambda generation, error: None)
    with pytest.raises(ConnectionError, match=r"me: it cannot be reached at 127.0.0.1:1 .*--advertise"):
        await sender.connect(GENERATION, dialler("a"), {"me": "127.0.0.1:1"}, 0.5, 10)
    await sender.close()


async def test_links_are_measured_in_both_directions(node: Node) -> None:
    report = await measure_links("a", [Peer(node="me", candidates=[node.address])], dialler("a"), 30)
    to_peer, from_peer = report.links
    assert (to_peer.source, to_peer.destination) == ("a", "me")
    assert (from_peer.source, from_peer.destination) == ("me", "a")
    for link in (to_peer, from_peer):
        assert not link.problem
        assert 0 < link.latency_seconds < 5
        assert link.bandwidth > 1e6
    assert (report.up, report.down) == (0, 0)  # nobody to share with


async def test_what_several_links_carry_together_is_measured_between_the_fastest_and_their_sum(node: Node) -> None:
    peers = [Peer(node="me", candidates=[node.address])] * 3
    report = await measure_links("a", peers, dialler("a"), 30)
    up = [link.bandwidth for link in report.links if link.source == "a"]
    down = [link.bandwidth for link in report.links if link.destination == "a"]
    assert max(up) <= report.up <= sum(up) * (1 + 1e-9)
    assert max(down) <= report.down <= sum(down) * (1 + 1e-9)


async def test_a_peer_that_hangs_costs_half_a_lease_and_the_others_are_measured(node: Node) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, but does not answer
        hung = Peer(node="hung", candidates=[f"127.0.0.1:{silent.getsockname()[1]}"])
        began = time.monotonic()
        report = await measure_links("a", [hung, Peer(node="me", candidates=[node.address])], dialler("a"), 2)
    assert time.monotonic() - began < 2
    assert [(link.destination, bool(link.problem)) for link in report.links] == [
        ("hung", True),
        ("a", True),
        ("me", False),
        ("a", False),
    ]


@contextlib.asynccontextmanager
async def peer_that_sends(download: Callable[..., AsyncIterator[bytes]]) -> AsyncIterator[Peer]:
    """A peer that answers pings and takes probes, but answers with ``download`` when it is to send one."""
    itself = Node().server
    itself.become(member("liar"))
    server = grpc.aio.server(options=server_options())
    answers = handlers({"Ping": itself._ping, "Upload": itself._upload, "Download": download})
    server.add_generic_rpc_handlers((answers,))
    port = server.add_secure_port("127.0.0.1:0", peer_credentials(lambda: member("liar")))
    await server.start()
    yield Peer(node="liar", candidates=[f"127.0.0.1:{port}"])
    await server.stop(None)


async def empty(answers: object, context: object) -> AsyncIterator[bytes]:
    while True:
        yield b""


async def too_much(answers: object, context: object) -> AsyncIterator[bytes]:
    for _ in range(MOST_BYTES // (1 << 20) + 1):
        yield bytes(1 << 20)


async def cut_short(answers: object, context: object) -> AsyncIterator[bytes]:
    yield bytes(1 << 20)


async def stalled(answers: object, context: object) -> AsyncIterator[bytes]:
    yield bytes(1 << 20)
    await asyncio.Event().wait()


@pytest.mark.parametrize("download", [empty, cut_short, stalled])
async def test_a_peer_that_sends_no_sound_probe_has_a_problem_and_the_others_are_measured(
    node: Node, download: Callable[..., AsyncIterator[bytes]]
) -> None:
    async with peer_that_sends(download) as liar:
        peers = [liar, Peer(node="me", candidates=[node.address]), Peer(node="me", candidates=[node.address])]
        report = await asyncio.wait_for(measure_links("a", peers, dialler("a"), 2), 15)
    assert [bool(link.problem) for link in report.links] == [True, True, False, False, False, False]
    assert [link.bandwidth > 0 for link in report.links] == [False, False, True, True, True, True]
    assert report.up > 0


async def test_no_more_of_a_probe_is_taken_than_was_asked_for(node: Node) -> None:
    async with (
        peer_that_sends(too_much) as liar,
        open_channel(liar.candidates[0], to_peer(member("a"), "liar")) as channel,
    ):
        with pytest.raises(ValueError, match=r"bytes, \d+ in all"):
            [size async for size in receive_probe(method(channel, "Download"))]


async def test_probes_are_bounded(node: Node) -> None:
    async def one_piece_too_many() -> AsyncIterator[bytes]:
        # No more than that: gRPC reports an internal error in place of a refusal that meets a message on its way.
        for _ in range(MOST_BYTES // (1 << 20) + 1):
            yield bytes(1 << 20)

    async with channel_to(node) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="a probe has at most"):
            [answer async for answer in method(channel, "Upload")(one_piece_too_many())]
        assert sum([size async for size in receive_probe(method(channel, "Download"))]) == MOST_BYTES


async def test_messages_to_a_node_are_at_most_a_frame_and_pings_a_few_bytes(node: Node) -> None:
    async with channel_to(node) as channel:
        assert await method(channel, "Ping")(bytes(MOST_PING_BYTES)) == bytes(MOST_PING_BYTES)
        with pytest.raises(grpc.aio.AioRpcError, match=f"a request of Ping has at most {MOST_PING_BYTES} bytes"):
            await method(channel, "Ping")(bytes(MOST_PING_BYTES + 1))
        with pytest.raises(grpc.aio.AioRpcError, match="larger than max"):
            await method(channel, "Ping")(bytes(MAX_FRAME_BYTES + REFUSED_BY_NAME_BYTES + 1))


async def test_a_wrong_answer_ends_a_probe(node: Node) -> None:
    async def wrong() -> AsyncIterator[bytes]:
        yield b"8191"

    async with channel_to(node) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match=r"the answer to a piece of \d+ bytes is b'8191'"):
            [piece async for piece in method(channel, "Download")(wrong())]


async def test_state_comes_from_whichever_donor_has_it_and_goes_on_where_it_stopped(node: Node) -> None:
    mine = Bucket(SPEC, torch.device("cpu"), torch.float32)
    donors = [Peer(node="gone", candidates=["127.0.0.1:1"]), Peer(node="me", candidates=[node.address])]
    total = bucket_bytes(SPEC, torch.float32)
    await fetch_states([(mine, donors)], STEP, GENERATION, dialler("a"), 30)
    assert all(torch.equal(a, b) for a, b in zip(mine.state, node.bucket.state, strict=True))

    async with channel_to(node) as channel:
        request = StateRequest(generation=GENERATION, step=STEP, bucket=3, offset=total - 10)
        (frame,) = [f async for f in method(channel, "State")(request.SerializeToString())]
    assert frame.endswith(bytes(node.bucket.read()[-10:]))


async def test_state_that_no_node_has_is_named(node: Node) -> None:
    mine = Bucket(SPEC, torch.device("cpu"), torch.float32)
    donors = [Peer(node="me", candidates=[node.address])]
    with pytest.raises(
        ConnectionError, match=r"bucket 3 as of step 9 .* state as of step 9 is not held here, but of 1"
    ):
        await fetch_states([(mine, donors)], 9, GENERATION, dialler("a"), 0.5)


async def test_a_peer_may_make_a_limited_number_of_calls_and_the_others_as_many(node: Node) -> None:
    wanted = StateRequest(generation=GENERATION, step=STEP, bucket=SPEC.index).SerializeToString()
    standby = StandbyRequest(buckets=[SPEC.index]).SerializeToString()
    async with channel_to(node, "a") as greedy, channel_to(node, "b") as modest:
        standbys = [method(greedy, "Standby")(standby) for _ in range(MOST_CALLS)]
        for call in standbys:
            await call.read()
        with pytest.raises(grpc.aio.AioRpcError, match=f"BUSY: this peer has {MOST_CALLS} calls of Standby running"):
            await method(greedy, "Standby")(standby).read()
        assert await method(modest, "Standby")(standby).read()
        for _ in range(2 * MOST_CALLS):  # a call that has ended does not count
            assert [frame async for frame in method(greedy, "State")(wanted)]


async def everything(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_a_revoked_peer_loses_its_calls_within_a_second_and_gets_no_others(node: Node) -> None:
    wanted = StandbyRequest(buckets=[SPEC.index]).SerializeToString()
    async with channel_to(node, "a") as revoked, channel_to(node, "b") as other:
        standbys = [method(channel, "Standby")(wanted) for channel in (revoked, other)]
        for call in standbys:
            await call.read()
        tensors = method(revoked, "Tensors")(metadata=named("a"))
        await tensors.write(tensor_frames()[0])
        began = time.monotonic()
        node.server.callers.revoke(["a"])
        for rest in (tensors, everything(standbys[0])):
            with pytest.raises(grpc.aio.AioRpcError, match="REVOKED"):
                await asyncio.wait_for(rest, 10)
        assert time.monotonic() - began < 1
        for again in (method(revoked, "Ping")(b""), method(revoked, "Tensors")(metadata=named("a"))):
            with pytest.raises(grpc.aio.AioRpcError, match="REVOKED"):
                await asyncio.wait_for(again, 10)
        with pytest.raises(grpc.aio.AioRpcError, match="REVOKED"):
            await method(revoked, "Standby")(wanted).read()
        assert await method(other, "Ping")(b"here") == b"here"
        assert not standbys[1].done()
        node.server.callers.revoke([])  # whatever the coordinator has forgotten since
        with pytest.raises(grpc.aio.AioRpcError, match="REVOKED"):
            await method(revoked, "Ping")(b"")
    async with channel_to(node, "a") as afresh:
        with pytest.raises(grpc.aio.AioRpcError, match="REVOKED"):
            await method(afresh, "Ping")(b"")


async def test_a_quarantined_peer_loses_its_calls_and_gets_others_once_it_is_forgiven(node: Node) -> None:
    wanted = StandbyRequest(buckets=[SPEC.index]).SerializeToString()
    async with channel_to(node, "a") as quarantined, channel_to(node, "b") as other:
        standbys = [method(channel, "Standby")(wanted) for channel in (quarantined, other)]
        for call in standbys:
            await call.read()
        node.server.callers.quarantine(["a", "x"])
        with pytest.raises(grpc.aio.AioRpcError, match="QUARANTINED"):
            await asyncio.wait_for(everything(standbys[0]), 10)
        with pytest.raises(grpc.aio.AioRpcError, match="QUARANTINED"):
            await method(quarantined, "Ping")(b"")
        assert not standbys[1].done()
        node.server.callers.quarantine(["x"])
        assert await method(quarantined, "Ping")(b"here") == b"here"


async def test_a_renewed_certificate_ends_nothing_and_channels_move_to_it_only_when_the_old_one_grows_old(
    node: Node,
) -> None:
    async def send_as(sender: Sender, identity: Identity, index: int) -> None:
        await sender.connect(GENERATION, Dialler(identity), {"me": node.address}, 20, 10)
        send(sender, "me", activation(GENERATION, STEP, index), torch.zeros(ELEMENTS))
        await asyncio.wait_for(node.arrived.get(), 20)

    lost: list[str] = []
    sender = Sender("a", lambda generation, error: lost.append(str(error)))
    old, young, newest = (member("a", now=NOW - age) for age in (0.7 * DAY, 0.2 * DAY, 0 * DAY))
    await send_as(sender, old, 0)
    first = sender._channels["me"]
    node.server.become(member("me"))  # its server's certificate changes too
    await send_as(sender, young, 2)
    second = sender._channels["me"]
    assert second is not first
    await sender.connect(GENERATION, Dialler(newest), {"me": node.address}, 20, 10)
    assert sender._channels["me"] is second
    assert not lost
    await sender.close()
