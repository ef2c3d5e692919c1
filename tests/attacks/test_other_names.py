"""Nobody takes another's place: not the coordinator's, not another node's in the plan, not another's name or invitation. A real
client tries each at a real coordinator or node. It is refused by name, and the others go on."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import grpc
import grpc.aio
import pytest
import torch

from dtfm.kernels.codec import DTYPE_NUMBERS
from dtfm.protos import control_pb2 as wire, services
from dtfm.protos.connection import open_channel, server_options
from dtfm.protos.frame import Header, Kind, frames
from dtfm.protos.identity.access import Role
from dtfm.protos.identity.credentials import coordinator_credentials, to_peer
from dtfm.protos.identity.invitation import Invitation, read_invitation
from dtfm.protos.identity.proof import proof
from dtfm.protos.streams import NODE_METADATA, method
from tests.attacks.test_the_run_goes_on import LIAR, STEPS, twisted
from tests.attacks.twisted import FORGED
from tests.cluster.launch import Cluster
from tests.cluster.ports import free_port
from tests.cluster.runs import GPT2, losses_alone, run_file
from tests.cluster.test_strangers import joined
from tests.coordinator.fake_node import enrolment
from tests.coordinator.serving import Served, serving
from tests.protos.members import key_of

PATIENCE = 20.0

ELEMENTS = 2 * 32 * 32
"""Of what passes between the stages of a run file of tests."""


class Calls(grpc.GenericRpcHandler):
    """Answers nothing, and remembers what it was asked."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def service(self, details: grpc.HandlerCallDetails) -> None:
        self.heard.append(details.method)


# The coordinator's place


@pytest.mark.soak
async def test_a_member_that_answers_in_the_place_of_a_coordinator_that_died_is_told_nothing(tmp_path: Path) -> None:
    text = run_file(model=GPT2, stages=[1, 1], steps=100_000)
    with Cluster(tmp_path, text, address=f"127.0.0.1:{free_port()}", nodes="ab", invited=True) as cluster:
        cluster.wait_for("step_committed")
        member = await joined(tmp_path / "m", cluster.invitation, "m")
        assert cluster.coordinator is not None
        cluster.coordinator.send(signal.SIGKILL)
        cluster.coordinator.wait(20)
        false, calls = grpc.aio.server(options=server_options()), Calls()
        false.add_generic_rpc_handlers((calls,))
        false.add_secure_port(cluster.address, coordinator_credentials(member))
        await false.start()
        for node in cluster.nodes.values():
            await asyncio.to_thread(node.wait_for_error, "somebody else answers there")
        await false.stop(None)
        assert calls.heard == []
        before = len(cluster.events)
        cluster.start_coordinator()
        cluster.wait_for("step_committed", after=before)
        assert cluster.coordinator is not None
        cluster.coordinator.send(signal.SIGINT)
        assert cluster.finish() == 1
    steps = [event["step"] for event in cluster.log() if event["event"] == "step_committed"]
    assert steps == list(range(1, len(steps) + 1))


# Another's position in the plan


async def answer(channel: grpc.aio.Channel, name: str, header: Header) -> str:
    """What the node there says to a frame that comes under this name."""
    call = method(channel, "Tensors")(metadata=((NODE_METADATA, name),))
    with contextlib.suppress(grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
        await call.write(next(frames(header, memoryview(bytes(header.total)))))  # the call may end before
        await call.done_writing()
    said: bytes = await asyncio.wait_for(call, PATIENCE)
    return said.decode()


@pytest.mark.soak
async def test_frames_of_a_member_that_is_nobodys_neighbour_are_refused_under_its_own_and_others_names(
    tmp_path: Path,
) -> None:
    """While the coordinator sleeps, no step is committed: then frames of the next one are due, from others."""
    text = run_file(model=GPT2, stages=[1, 1], steps=100_000)
    with Cluster(tmp_path, text, nodes="ab", invited=True) as cluster:
        cluster.wait_for("step_committed")
        member = await joined(tmp_path / "m", cluster.invitation, "m")
        addresses = {event["node"]: event["address"] for event in cluster.of("node_joined")}
        generation = cluster.of("plan_started")[-1]["generation"]
        assert cluster.coordinator is not None
        cluster.coordinator.send(signal.SIGSTOP)
        step = [event["step"] for event in cluster.log() if event["event"] == "step_committed"][-1] + 1
        for node, kind, sender in (("b", Kind.ACTIVATION, "a"), ("a", Kind.GRADIENT, "b")):
            header = Header(kind, 0, DTYPE_NUMBERS[torch.float64], generation, step, 0, 0, ELEMENTS, 8 * ELEMENTS)
            async with open_channel(addresses[node], to_peer(member, node)) as channel:
                assert await answer(channel, "m", header) == (
                    f"UNEXPECTED: {kind.name} 0 part 0 from m; the plan has {sender} send it here"
                )
                assert await answer(channel, sender, header) == f"CERTIFICATE: the caller's does not name '{sender}'"
        cluster.coordinator.send(signal.SIGCONT)
        cluster.wait_for("step_committed", where=lambda event: event["step"] > step + 3)
        cluster.coordinator.send(signal.SIGINT)
        assert cluster.finish() == 1
        assert not cluster.of("step_aborted")
        assert cluster.losses == pytest.approx(losses_alone(cluster.run_file, steps=len(cluster.losses)), rel=1e-8)


def test_a_node_of_the_plan_that_forges_frames_of_other_stages_and_names_changes_nothing(tmp_path: Path) -> None:
    text = run_file(model=GPT2, stages=[2, 2], steps=STEPS)
    names = ("a", "b", "c", LIAR)
    with Cluster(tmp_path, text, place=partial(twisted, "forges"), nodes=names, invited=True) as cluster:
        assert cluster.finish() == 0
        assert not cluster.of("step_aborted")
        assert cluster.losses == pytest.approx(losses_alone(cluster.run_file), rel=1e-9)
        said = [line.removeprefix(FORGED) for line in cluster.nodes[LIAR].errors.splitlines() if FORGED in line]
    named = {line.split(":")[0] for line in said}
    assert {"UNEXPECTED", "CERTIFICATE"} <= named <= {"UNEXPECTED", "CERTIFICATE", "STALE", ""}, said


# Another's invitation, and another's name


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with serving(tmp_path) as served:
        yield served


async def invited(served: Served) -> Invitation:
    """An invitation of one use."""
    request = wire.InviteRequest(role=Role.NODE.value, seconds=60, uses=1)
    reply = await served.server.ask(request, served.operator)
    assert isinstance(reply, wire.InviteReply)
    return read_invitation(reply.invitation)


async def refusal(served: Served, invitation: Invitation, name: str, key: str) -> str:
    """How the coordinator answers whoever shows this invitation and has this key; empty if the name is theirs now."""
    async with served.channel() as channel:
        stub = services.stub("Coordinator", channel)
        try:
            await stub.Enrol(enrolment(name, invitation, key), metadata=proof(key_of(key), name, served.server.pin))
        except grpc.aio.AioRpcError as error:
            return str(error.details()).split(":")[0]
        return ""


async def test_of_many_who_show_an_invitation_of_one_use_at_once_one_gets_in(served: Served) -> None:
    once = await invited(served)
    names = [f"thief-{number}" for number in range(8)]
    answers = await asyncio.gather(*(refusal(served, once, name, name) for name in names))
    assert sorted(answers) == ["", *["INVITATION_USED_UP"] * 7]
    winner = names[answers.index("")]
    assert set(names) & served.server.ledger.access.names.keys() == {winner}
    assert await refusal(served, once, "later", "later") == "INVITATION_USED_UP"
    assert await refusal(served, once, winner, winner) == "", "it may ask twice, as an answer may get lost"


async def test_an_invitation_that_was_revoked_lets_nobody_in(served: Served) -> None:
    revoked = await invited(served)
    await served.server.ask(wire.RevokeRequest(what=revoked.id), served.operator)
    assert await refusal(served, revoked, "thief", "thief") == "REVOKED"
    assert "thief" not in served.server.ledger.access.names


async def test_a_name_is_not_another_keys_while_its_owner_is_a_member_nor_when_it_has_gone_nor_when_it_is_revoked(
    served: Served,
) -> None:
    async with served.node("owner") as owner:
        await served.until(lambda: "owner" in served.ledger.members)
        assert await refusal(served, await invited(served), "owner", "thief") == "NAME_TAKEN"
        async with served.node("thief", node="owner") as thief:
            await asyncio.wait_for(thief.over.wait(), PATIENCE)
            assert thief.refusal is not None
            assert thief.refusal.reason == wire.NAME_TAKEN
        assert not owner.over.is_set()
    await served.until(lambda: "owner" not in served.ledger.members)
    assert await refusal(served, await invited(served), "owner", "thief") == "NAME_TAKEN"
    await served.server.ask(wire.RevokeRequest(what="owner"), served.operator)
    for key in ("thief", "owner"):
        assert await refusal(served, await invited(served), "owner", key) in ("NAME_TAKEN", "REVOKED")


async def test_a_second_process_with_a_members_key_does_not_take_its_place(served: Served) -> None:
    async with served.node("owner") as owner:
        await served.until(lambda: "owner" in served.ledger.members)
        async with served.node("owner", incarnation=2) as copy:
            await asyncio.wait_for(copy.over.wait(), PATIENCE)
            assert copy.refusal is not None
            assert copy.refusal.reason == wire.IDENTITY_IN_USE
        assert not owner.over.is_set()
        assert "owner" in served.ledger.members
