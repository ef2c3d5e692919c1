"""Whatever happens to nodes that do as they are told: what the coordinator counts on is on their disks, and little else."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from dtfm.coordinator.core.safekeeping.snapshot import PAUSE_LEASES
from dtfm.coordinator.core.state import Destination, Stepping, Switching
from dtfm.coordinator.core.transition import TimePassed
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire
from tests.coordinator.answers import links
from tests.coordinator.script import LEASE, LONG, World, fresh_state, prepared

PAUSE = PAUSE_LEASES * LEASE
NODES = ("a", "b", "c")


@dataclass
class Node:
    """``disk``: by step and bucket the file's digest; ``heard`` of its messages are done with; ``work``: what it is to write or
    fetch."""

    disk: dict[int, dict[int, bytes]] = field(default_factory=dict)
    heard: int = 0
    whole: int = 0
    work: wire.KeepSnapshots | None = None


class Machines:
    """Nodes with disks that last, around a coordinator."""

    def __init__(self) -> None:
        self.world = World(fresh_state(**LONG, cluster={"nodes": 2, "stages": "auto"}))
        self.world.automatic_standbys = False
        self.nodes = {name: Node() for name in NODES}
        self.incarnation = 0

    def here(self, name: str) -> bool:
        return name in self.world.state.members.sessions

    def come(self, name: str) -> None:
        """A new process, on the same disk; it begins to measure its links."""
        world, node = self.world, self.nodes[name]
        self.incarnation += 1
        world.greet(name, incarnation=self.incarnation)
        node.heard, node.whole, node.work = 0, 0, None
        claims = [
            wire.SnapshotParts(step=step, parts=[wire.Part(bucket=bucket) for bucket in sorted(buckets)])
            for step, buckets in sorted(node.disk.items())
        ]
        world.hear(name, prepared(on_disk=claims))

    def report(self, name: str) -> None:
        """What it has measured; then it can be planned with."""
        world = self.world
        world.hear(name, links(name, [other for other in world.state.members.sessions if other != name]))
        world.now += LEASE / 10
        world.feed(TimePassed())

    def listen(self) -> None:
        """Nodes do what takes no time of all that they were told."""
        for name, node in self.nodes.items():
            messages = self.world.heard_by(name) if name in self.world.streams else []
            for message in messages[node.heard :]:
                if message.WhichOneof("message") == "keep_snapshots":
                    self._tidy(node, message.keep_snapshots.whole, message.keep_snapshots.under_way)
                    node.whole = message.keep_snapshots.whole
                    node.work = message.keep_snapshots if message.keep_snapshots.missing else node.work
                elif message.commit.snapshot == wire.DISKS:
                    step = message.commit.step
                    self._tidy(node, node.whole, step)
                    plan = self.world.plan_in_force
                    stage = plan.stage_of(name)
                    assert stage is not None
                    generation = message.commit.generation  # of the same step, trained again, the state may be another
                    mine = [
                        wire.Part(bucket=bucket, digest=bytes([bucket, generation % 256]) * 16)
                        for bucket in range(*plan.stages[stage].layers)
                    ]
                    node.work = wire.KeepSnapshots(under_way=step, missing=mine)
            node.heard = len(messages)

    def do_work(self, name: str, able: bool) -> None:
        """The node writes, or fetches, what it was told to, as far as those that have it are here."""
        node = self.nodes[name]
        if node.work is None or not self.here(name):
            return
        step, wanted = node.work.under_way, node.work.missing
        mine = node.disk.setdefault(step, {})
        for part in wanted if able else []:
            if not part.nodes or any(self.has(n, step, part.bucket, part.digest) for n in part.nodes if self.here(n)):
                mine[part.bucket] = part.digest
        done = [p for p in wanted if self.has(name, step, p.bucket, p.digest)]
        parts = [wire.Part(bucket=p.bucket, size_bytes=8, digest=p.digest) for p in done]
        node.work = None
        problem = "" if len(done) == len(wanted) else "it could not"
        self.world.hear(
            name, snapshot_parts=wire.SnapshotParts(destination=wire.DISKS, step=step, parts=parts, problem=problem)
        )

    def has(self, name: str, step: int, bucket: int, digest: bytes) -> bool:
        return self.nodes[name].disk.get(step, {}).get(bucket) == digest

    def _tidy(self, node: Node, *steps: int) -> None:
        node.disk = {step: buckets for step, buckets in node.disk.items() if step in steps}

    def check(self) -> None:
        state = self.world.state
        assert self.world.refolded() == state.ledger
        backup, backing = state.ledger.on_disks, state.safekeeping.snapshot(Destination.DISKS)
        counted_on = {backup.step: dict(enumerate(backup.parts))} if backup is not None else {}
        if backing is not None:
            counted_on[backing.step] = dict(backing.parts)
        for name, session in state.members.sessions.items():
            assert session.on_disk.keys() <= counted_on.keys()
            for step, buckets in session.on_disk.items():
                for bucket in buckets:
                    assert self.has(name, step, bucket, bytes.fromhex(counted_on[step][bucket].digest)), (name, step)
        assert all(len(node.disk) <= 2 for node in self.nodes.values())

    def restorable(self, backup: ev.SnapshotWritten | None) -> int:
        """Its step, if all of it is on the disks of nodes that are here; else 0."""
        if backup is None:
            return 0
        here = [name for name in NODES if self.here(name)]
        digests = enumerate(bytes.fromhex(part.digest) for part in backup.parts)
        there = all(any(self.has(name, backup.step, bucket, digest) for name in here) for bucket, digest in digests)
        return backup.step if there else 0


MOVES = st.one_of(
    *[st.just(("train",))] * 3,
    *[st.just(("train later",))] * 3,
    st.tuples(st.just("work"), st.sampled_from(NODES), st.sampled_from([True, True, True, False])),
    *[st.just(("all work",))] * 3,
    *[st.tuples(st.just("come"), st.sampled_from(NODES))] * 3,
    *[st.tuples(st.just("report"), st.sampled_from(NODES))] * 3,
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
        case "all work":
            for _ in range(2):  # first what they train, then what others have
                for node in NODES:
                    machines.do_work(node, True)
                machines.listen()
        case "come" if not machines.here(rest[0]):
            machines.come(rest[0])
        case "report" if machines.here(rest[0]):
            machines.report(rest[0])
        case "lose" | "lose with its disk" if machines.here(rest[0]):
            world.lose(rest[0])
            if name != "lose":
                machines.nodes[rest[0]].disk = {}


@settings(max_examples=60, deadline=None)
@given(st.lists(MOVES, min_size=10, max_size=60))
def test_files_that_the_coordinator_counts_on_are_on_disk_and_training_goes_back_to_them(
    moves: list[tuple[Any, ...]],
) -> None:
    machines = Machines()
    for name in NODES[:2]:
        machines.come(name)
        machines.report(name)
    for move in moves:
        rolled, backup = len(machines.world.events(ev.RolledBack)), machines.world.state.ledger.on_disks
        play(machines, move)
        for event in machines.world.events(ev.RolledBack)[rolled:]:
            assert event.step == machines.restorable(backup)
        machines.listen()
        machines.check()
