"""In any order of events, the files that the coordinator counts on are on the nodes' disks, and few others are."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, strategies as st

from dtfm.coordinator.core.copies.snapshot import PAUSE_LEASES
from dtfm.coordinator.core.phases import Stepping, Switching
from dtfm.coordinator.core.transition import ManifestDone, TimePassed
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire
from tests.coordinator.answers import links, uploaded
from tests.coordinator.script import LEASE, LONG, World, fresh_state, prepared

PAUSE = PAUSE_LEASES * LEASE
NODES = ("a", "b", "c")


@dataclass
class Node:
    """``disk`` has the digest of each file, by step and bucket; ``read`` is the number of messages that the node has read;
    ``orders`` say what it has to write or to fetch, ``uploads`` what it has to send to checkpoints."""

    disk: dict[int, dict[int, bytes]] = field(default_factory=dict)
    read: int = 0
    orders: list[wire.Move] = field(default_factory=list)
    uploads: list[wire.Move] = field(default_factory=list)


class Machines:
    """A coordinator, and nodes whose disks outlast their processes."""

    def __init__(self) -> None:
        changes = {**LONG, "cluster": {"nodes": 2, "stages": "auto"}, "checkpoint": {"every": 3, "holds": "weights"}}
        self.world = World(fresh_state(**changes))
        self.world.automatic_standbys = False
        self.nodes = {name: Node() for name in NODES}
        self.incarnation = 0

    def is_member(self, name: str) -> bool:
        return name in self.world.state.members.sessions

    def start(self, name: str) -> None:
        """The node joins as a new process with the same disk; it has still to measure its links."""
        world, node = self.world, self.nodes[name]
        self.incarnation += 1
        node.read, node.orders, node.uploads = 0, [], []
        claims = [
            wire.Moved(step=step, parts=[wire.Part(bucket=bucket) for bucket in sorted(buckets)])
            for step, buckets in sorted(node.disk.items())
        ]
        world.prepare(name, prepared(on_disk=claims), incarnation=self.incarnation)

    def report_links(self, name: str) -> None:
        """The node has measured its links, and becomes ready."""
        world = self.world
        world.hear(name, links(name, [other for other in world.state.members.sessions if other != name]))
        world.now += LEASE / 10
        world.feed(TimePassed())

    def read_messages(self) -> None:
        """Nodes read their messages, remove files that they need not keep, and note what they have to write or to fetch."""
        for name, node in self.nodes.items():
            messages = self.world.heard_by(name) if name in self.world.streams else []
            for message in messages[node.read :]:
                if message.WhichOneof("message") == "keep":
                    steps = message.keep.steps
                    node.disk = {step: buckets for step, buckets in node.disk.items() if step in steps}
                    node.orders = [order for order in node.orders if order.step in steps]
                elif message.move.folder:
                    parts = message.move.parts
                    assert all(self.has(name, message.move.step, part.bucket, part.digest) for part in parts), name
                    node.uploads.append(message.move)
                elif message.WhichOneof("message") == "move":
                    node.orders = [order for order in node.orders if order.step == message.move.step]
                    node.orders.append(message.move)
                elif message.commit.snapshot:
                    step = message.commit.step
                    plan = self.world.plan_in_force
                    stage = plan.stage_of(name)
                    assert stage is not None
                    generation = message.commit.generation  # a step that is trained again may have other state
                    mine = [
                        wire.Part(bucket=bucket, digest=bytes([bucket, generation % 256]) * 16)
                        for bucket in range(*plan.stages[stage].layers)
                    ]
                    node.orders = [wire.Move(step=step, parts=mine)]
            node.read = len(messages)

    def do_work(self, name: str, able: bool) -> None:
        """The node writes its files, or fetches files that a member has, if it is ``able`` to. Then it reports."""
        node = self.nodes[name]
        if not node.orders or not self.is_member(name):
            return
        order = node.orders.pop(0)
        step, wanted = order.step, order.parts
        mine = node.disk.setdefault(step, {})
        for part in wanted if able else []:
            if not part.nodes or any(
                self.has(n, step, part.bucket, part.digest) for n in part.nodes if self.is_member(n)
            ):
                mine[part.bucket] = part.digest
        done = [p for p in wanted if self.has(name, step, p.bucket, p.digest)]
        parts = [wire.Part(bucket=p.bucket, size_bytes=8, digest=p.digest) for p in done]
        problem = "" if len(done) == len(wanted) else "scripted"
        self.world.hear(name, moved=wire.Moved(step=step, parts=parts, problem=problem))

    def send_files(self, name: str, able: bool) -> None:
        """The node sends the files it was asked for, if it is ``able`` to. If all files are there, the manifest is written."""
        node = self.nodes[name]
        for upload in node.uploads if self.is_member(name) else []:
            files = {part.bucket: (8, part.digest) for part in upload.parts if able}
            self.world.hear(name, uploaded(upload.step, files, "" if able else "scripted", moments=bytes(64)))
        node.uploads = []
        if self.world.manifests:
            self.world.feed(ManifestDone(self.world.manifests.pop().step, "" if able else "scripted"))

    def has(self, name: str, step: int, bucket: int, digest: bytes) -> bool:
        return self.nodes[name].disk.get(step, {}).get(bucket) == digest

    def check(self) -> None:
        """Every file that the coordinator counts on is on its node's disk, and no disk holds more than four snapshots."""
        state = self.world.state
        assert self.world.refolded() == state.ledger
        counted_on = {step: dict(enumerate(whole.parts)) for step, whole in state.ledger.copies.on_disks.items()}
        for under_way in (state.safekeeping.snapshot, state.safekeeping.upload):
            if under_way is not None:
                counted_on[under_way.step] = dict(under_way.parts)
        for name, session in state.members.sessions.items():
            assert session.on_disk.keys() <= counted_on.keys()
            for step, buckets in session.on_disk.items():
                for bucket in buckets:
                    assert self.has(name, step, bucket, bytes.fromhex(counted_on[step][bucket].digest)), (name, step)
        assert all(len(node.disk) <= 4 for node in self.nodes.values())

    def restorable(self, snapshots: Collection[ev.SnapshotWritten]) -> int:
        """The newest step whose files are all on members' disks; 0: none."""
        here = [name for name in NODES if self.is_member(name)]

        def is_there(snapshot: ev.SnapshotWritten) -> bool:
            digests = enumerate(bytes.fromhex(part.digest) for part in snapshot.parts)
            return all(
                any(self.has(name, snapshot.step, bucket, digest) for name in here) for bucket, digest in digests
            )

        return max((snapshot.step for snapshot in snapshots if is_there(snapshot)), default=0)


MOVES = st.one_of(
    *[st.just(("train",))] * 3,
    *[st.just(("train later",))] * 3,
    st.tuples(st.just("work"), st.sampled_from(NODES), st.sampled_from([True, True, True, False])),
    st.tuples(st.just("send"), st.sampled_from(NODES), st.sampled_from([True, True, False])),
    *[st.just(("all work",))] * 3,
    *[st.tuples(st.just("start"), st.sampled_from(NODES))] * 3,
    *[st.tuples(st.just("report links"), st.sampled_from(NODES))] * 3,
    st.tuples(st.just("lose"), st.sampled_from(NODES)),
    *[st.tuples(st.just("lose with its disk"), st.sampled_from(NODES))] * 2,
)


def play(machines: Machines, move: tuple[Any, ...]) -> None:
    world, (name, *rest) = machines.world, move
    match name:
        case "train" | "train later":
            if isinstance(world.state.phase, Switching):
                world.settle()
            if name == "train later":
                world.now += PAUSE
                for node in list(world.state.members.sessions):
                    world.hear(node, heartbeat=wire.Heartbeat())
                world.feed(TimePassed())
            if isinstance(world.state.phase, Stepping):
                world.step()
        case "work":
            machines.do_work(*rest)
        case "send":
            machines.send_files(*rest)
        case "all work":
            for _ in range(2):  # they write first, then they fetch
                for node in NODES:
                    machines.do_work(node, True)
                machines.read_messages()
        case "start" if not machines.is_member(rest[0]):
            machines.start(rest[0])
        case "report links" if machines.is_member(rest[0]):
            machines.report_links(rest[0])
        case "lose" | "lose with its disk" if machines.is_member(rest[0]):
            world.lose(rest[0])
            if name != "lose":
                machines.nodes[rest[0]].disk = {}


@given(st.lists(MOVES, min_size=10, max_size=60))
def test_files_that_the_coordinator_counts_on_are_on_disk_and_training_goes_back_to_them(
    moves: list[tuple[Any, ...]],
) -> None:
    machines = Machines()
    for name in NODES[:2]:
        machines.start(name)
        machines.report_links(name)
    for move in moves:
        rolled, before = len(machines.world.events(ev.RolledBack)), machines.world.state.ledger.copies.on_disks.values()
        play(machines, move)
        for event in machines.world.events(ev.RolledBack)[rolled:]:
            assert event.step == machines.restorable(before)
        machines.read_messages()
        machines.check()
