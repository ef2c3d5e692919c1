"""A stranger cannot join a run, read its state or send to it, and an eavesdropper sees none of its tensors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import pytest
import torch

from dtfm.node.model.bucket import Bucket, BucketSpec
from dtfm.node.network.dialling import Dialler
from dtfm.node.state.recovery import fetch_states
from dtfm.node.transport.sender import Sender
from dtfm.protos import services
from dtfm.protos.control_pb2 import NodeMessage, Peer
from dtfm.protos.frame import Header, Kind, frames
from dtfm.protos.identity.access import Role
from dtfm.protos.identity.credentials import Identity
from dtfm.protos.identity.enrolment import Entry
from dtfm.protos.streams import method
from tests.cluster.launch import Cluster
from tests.cluster.ports import free_port
from tests.cluster.relay import Relay
from tests.cluster.runs import run_file
from tests.coordinator.script import hello


async def joined(folder: Path, invitation: str, node: str) -> Identity:
    """Joins as ``node``, hangs up, and returns the identity that the coordinator has given it."""
    with user(folder):
        opened = await Entry(invitation, [Role.NODE], node).open(10)
    async with opened.channel(10) as channel:
        stub = services.stub("Coordinator", channel)

        async def greeting() -> AsyncIterator[NodeMessage]:
            yield hello(node)
            await asyncio.Event().wait()  # a node that ends its half of the stream has left

        async for message in stub.Join(greeting(), metadata=opened.metadata):
            return Identity(message.welcome.authority, message.welcome.certificate, opened.access.key)
    raise AssertionError("no welcome")


@contextmanager
def user(folder: Path) -> Iterator[None]:
    """Inside, this process has the state folder of another user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder))
        yield


def elsewhere(folder: Path) -> dict[str, str]:
    """The environment of a node on another machine: it shares no state folder with the coordinator."""
    return {"XDG_STATE_HOME": str(folder), "DTFM_INVITATION": ""}


async def test_strangers_cannot_join_nor_reach_a_node(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    run = run_file(stages=[1, 1], steps=1)
    with Cluster(tmp_path, run, nodes=["a"]) as cluster, Cluster(other, run) as other_cluster:
        stranger = cluster.add("b", environment=elsewhere(tmp_path / "stranger"))
        assert stranger.wait(60) == 2
        assert "INVITATION_NEEDED" in stranger.errors
        assert "dtfm-coordinator invite --role node" in stranger.errors
        a = Peer(node="a", candidates=[cluster.wait_for("node_joined")["address"]])
        mine = await joined(tmp_path / "c", cluster.invitation, "c")
        theirs = await joined(tmp_path / "c", other_cluster.invitation, "c")

        async with grpc.aio.insecure_channel(a.candidates[0]) as channel:
            with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
                await method(channel, "Ping")(b"")
        bucket = Bucket(BucketSpec(0, (0,), (("weight", (4, 4)),)), torch.device("cpu"), torch.float64)
        trusting = replace(theirs, authority=mine.authority)  # trusts node a, which does not trust it
        for identity, reason in ((mine, "NOT_HELD"), (theirs, "UNAVAILABLE"), (trusting, "UNAVAILABLE")):
            with pytest.raises(ConnectionError, match=reason):
                await fetch_states([(bucket, [a])], 1, 1, Dialler(identity), 0.3)
        sender = Sender("c", lambda generation, error: None)
        await sender.connect(1, Dialler(mine), {"a": a.candidates[0]}, 20, 10)
        with pytest.raises(ConnectionError, match="a: it cannot be reached"):
            await sender.connect(2, Dialler(theirs), {"a": a.candidates[0]}, 1, 10)
        await sender.close()


def test_an_eavesdropper_sees_no_tensor(tmp_path: Path) -> None:
    ports = [free_port(), free_port()]
    with (
        Relay(ports[0]) as first,
        Relay(ports[1]) as second,
        Cluster(tmp_path, run_file(stages=[1, 1], steps=3)) as cluster,
    ):
        for name, port, relay in (("a", ports[0], first), ("b", ports[1], second)):
            cluster.add(name, "--listen", f"127.0.0.1:{port}", "--advertise", f"127.0.0.1:{relay.port}")
        assert cluster.finish() == 0
        heard = [bytes(stream) for relay in (first, second) for stream in relay.heard]
    assert max(map(len, heard)) > 3 * 20 * 32 * 32 * 8  # the activations of three steps, in float64
    for kind in (Kind.ACTIVATION, Kind.GRADIENT):
        begins = next(frames(Header(kind, 0, 0, 1, 1, 0, 0, 0, 0), memoryview(b"")))[:6]
        assert not any(begins in stream for stream in heard)
