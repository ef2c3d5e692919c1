"""Nodes that audit each other between their votes and the commit, over real connections. The test is their coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from dtfm.node.data.allowed import Allowed
from dtfm.node.state.disk import Disk
from dtfm.node.state.snapshots import Snapshots
from dtfm.node.state.state_store import StateStore
from dtfm.node.training.audits import auditing
from dtfm.node.training.equipment import Equipment
from dtfm.node.training.preparing import preparation
from dtfm.node.training.trainer import Trainer
from dtfm.node.transport.kept import Witnesses
from dtfm.node.transport.peer_server import PeerServer
from dtfm.node.transport.sender import Sender
from dtfm.protos.control_pb2 import Assignment, Audit, Begin, Commit, Device, NodeMessage, Peer, StepReady
from dtfm.protos.run_file.run_file import read_run_file
from tests.cluster.runs import GPT2, run_file, write_corpus
from tests.node.assignments import assigned
from tests.node.dialling import dialler
from tests.node.in_process import even_plan
from tests.node.load_once import load_once
from tests.node.training.audits.auditors import digests
from tests.protos.members import member

LAYERS, MICRO_BATCHES, LEASE = 5, 10, 20.0
NAMES = ("n0", "n1", "n2", "n3")


class Node:
    """A trainer with its peer server; ``said`` are its messages."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.said: asyncio.Queue[NodeMessage] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def report(message: NodeMessage) -> None:
            loop.call_soon_threadsafe(self.said.put_nowait, message)

        self.equipment = Equipment(
            node=name,
            device=torch.device("cpu"),
            hardware=Device(kind="cpu", memory_bytes=1 << 30, flops=1e12),
            sender=Sender(name, lambda *failed: None),
            store=StateStore(),
            tokens=folder / "tokens",
            frozen=folder / "frozen",
            snapshots=Snapshots(Disk(folder, name), report),
        )
        self.trainer = Trainer(self.equipment, loop, report, lambda error: pytest.fail(str(error)))
        self.server = PeerServer(self.equipment.store, lambda _: asyncio.sleep(0), kept=self.equipment.kept)
        self.server.become(member(name))

    async def stop(self) -> None:
        await asyncio.to_thread(self.trainer.stop)
        self.equipment.snapshots.writer.close()
        await self.equipment.sender.close()
        await self.server.stop()


class Run:
    """Two stages of two replicas that have voted on step 1."""

    def __init__(self, nodes: dict[str, Node]) -> None:
        self.nodes = nodes
        self.votes: dict[str, StepReady] = {}

    async def vote(self) -> None:
        for name, node in self.nodes.items():
            self.votes[name] = (await node.said.get()).step_ready
            assert self.votes[name].kept

    def audit(self, node: str) -> Audit:
        """Of the first micro-batch of ``node``, which is of the second stage."""
        vote = self.votes[node]
        (activation,) = [(p.peer, p.indices[0], p.digests[:16]) for p in vote.received if p.kind == 1][:1]
        previous, number, entered = activation
        left = digests(vote.sent)[previous, 2, number, 0]  # type: ignore[index]
        micro_batch = Audit.MicroBatch(
            number=number, previous=previous, activation_in=entered, gradient_out=left, loss=vote.losses[0]
        )
        return Audit(number=9, generation=1, step=1, node=node, micro_batches=[micro_batch])

    def commit(self) -> None:
        clips = [Commit.Clip(past_last_layer=LAYERS, factor=1.0)]
        for node in self.nodes.values():
            node.trainer.conclude(Commit(generation=1, step=1, clips=clips, pause=True))


@pytest.fixture
async def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Run]:
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path)
    text = run_file(model=GPT2, stages=[2, 2], steps=4, lease=LEASE, storage="coordinator:")
    (tmp_path / "run.toml").write_text(f"{text}[trust]\naudit_rate = 1.0\n")
    message = read_run_file(tmp_path / "run.toml").message("test")
    monkeypatch.setattr(preparation, "load_model", load_once)
    monkeypatch.setattr(preparation, "layer_flops", lambda *_: 1e9)
    nodes = {name: Node(name, tmp_path / name) for name in NAMES}
    ports = {name: await node.server.start("127.0.0.1:0") for name, node in nodes.items()}
    peers = [Peer(node=name, candidates=[f"127.0.0.1:{port}"]) for name, port in ports.items()]
    plan = even_plan(LAYERS, 2, 2, MICRO_BATCHES)
    assignment = assigned(plan, donors=[Assignment.Donors() for _ in range(LAYERS)], peers=peers)
    for name, node in nodes.items():
        node.trainer.prepare(message, dialler(name), Allowed(["/"]))
        assert (await node.said.get()).prepared.flops > 0  # transformers builds one model at a time
    for node in nodes.values():
        node.trainer.adopt(assignment, node.server.deliver_to)
    for node in nodes.values():
        assert (await node.said.get()).plan_ready.generation == 1
    for node in nodes.values():
        node.trainer.begin(Begin(generation=1, step=1))
    run = Run(nodes)
    await run.vote()
    yield run
    for node in nodes.values():
        await node.stop()


async def test_a_replica_does_anothers_work_again_before_the_commit_and_the_run_goes_on(run: Run) -> None:
    auditor = run.nodes["n3"]

    def fails(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    with mock.patch.object(auditing, "do_again", fails):
        auditor.trainer.audit(run.audit("n2"))
        answer = (await auditor.said.get()).audited
        assert (answer.problem, answer.losses) == ("FAILED: OutOfMemoryError: no room", -1)
    auditor.trainer.audit(run.audit("n2"))
    answer = (await auditor.said.get()).audited
    assert (answer.number, answer.problem, answer.withheld_by) == (9, "", "")
    assert (answer.activations, answer.gradients, answer.addends, answer.losses) == (-1, 0, -1, 0)
    run.commit()
    applied = [(await node.said.get()).applied for node in run.nodes.values()]
    assert applied[0].state_digest == applied[1].state_digest
    assert applied[2].state_digest == applied[3].state_digest


async def test_an_audit_of_another_step_or_after_the_commit_is_not_answered(run: Run) -> None:
    auditor, audit = run.nodes["n3"], run.audit("n2")
    later = Audit.FromString(audit.SerializeToString())
    later.step = 2
    auditor.trainer.audit(later)
    run.commit()
    assert (await auditor.said.get()).applied.step == 1
    auditor.trainer.audit(audit)
    auditor.trainer.adopt(assigned(even_plan(LAYERS, 2, 2, MICRO_BATCHES)), lambda _: None)
    assert (await auditor.said.get()).WhichOneof("message") != "audited"


async def test_a_commit_calls_off_the_audits_that_came_before_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """One waits for a neighbour that says nothing, and another for the first."""
    auditor, asked = run.nodes["n3"], asyncio.Event()

    async def nothing(*_: object) -> None:
        asked.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Witnesses, "fetch", nothing)
    for _ in range(2):
        auditor.trainer.audit(run.audit("n2"))
    await asked.wait()
    run.commit()
    assert (await auditor.said.get()).applied.step == 1


async def test_an_auditor_that_is_too_slow_says_so_and_names_nobody(run: Run) -> None:
    auditor, audit = run.nodes["n3"], run.audit("n2")
    audit.seconds = 1e-9
    auditor.trainer.audit(audit)
    answer = (await auditor.said.get()).audited
    assert (answer.withheld_by, answer.losses) == ("", -1)
    assert "cannot do this much in the time" in answer.problem


async def test_an_abort_calls_off_an_audit_and_what_was_kept(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    auditor, asked = run.nodes["n3"], asyncio.Event()

    async def nothing(*_: object) -> None:
        asked.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Witnesses, "fetch", nothing)
    auditor.trainer.audit(run.audit("n2"))
    await asked.wait()
    for node in run.nodes.values():
        node.trainer.call_off("a test")
        assert node.equipment.kept.offer is None
    auditor.trainer.adopt(assigned(even_plan(LAYERS, 1, 1, MICRO_BATCHES - 1)), lambda _: None)
    assert (await auditor.said.get()).WhichOneof("message") == "plan_failed"
