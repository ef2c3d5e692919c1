"""How much islands train while their nodes die: ``python -m tests.bench.deaths [--minutes 20] [--lines 1/1 10/10] [--nodes 4]
[--sizes 1 2] [--rounds 30] [--json]``.

As in ``time_to_loss --deaths``, one node is killed in the middle of each round, and started again immediately. Here time is
simulated: the coordinator's state machine is real, and nodes answer after the seconds that the planner's model says. Steps take
as long as the plan's simulation, copies as long as their bytes over a home's line. A node that is killed is back after twice
START seconds. The model and the devices are those of time_to_loss. A line is a home's, in Mbit/s down and up.

At exchanges islands of --sizes nodes form again, whatever the planner would choose. Only islands that begin within a round are
its choice. So with pairs all wait at an exchange for state that the planner would leave where it is.

A value is the number of steps that one node alone would need to learn as much: steps of islands count by the planner's estimate
of the tokens that these islands need. Samples that were lost count once they have come again. The value is compared with the
steps that one node trains alone in that time.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from dtfm.coordinator.core import transition as t
from dtfm.coordinator.core.phases import Stepping
from dtfm.coordinator.core.state.planner import PlanChosen
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.service.planning.planner import carried_on, within_round
from dtfm.protos import control_pb2 as wire, plan_pb2
from dtfm.scheduler.cost.exchange import exchange_seconds, tokens_needed
from dtfm.scheduler.formats.plan import unpack_plan
from dtfm.scheduler.islands.layout import QUICK, dealt, renumbered, with_share
from dtfm.scheduler.model.cluster import Cluster
from dtfm.scheduler.model.owed import total
from dtfm.scheduler.model.plan import joined
from dtfm.scheduler.model.problem import Problem
from dtfm.scheduler.replan.price import Terms, island_seconds, price_of_layout
from dtfm.scheduler.schedule import schedule
from tests.bench.homes import MICRO_BATCHES, homes
from tests.bench.rows import Row, show
from tests.coordinator.answers import buckets_of
from tests.coordinator.script import World, fresh_state, prepared
from tests.coordinator.snapshots import SIZE
from tests.wan.unequal import FASTEST, LAYERS, LEASE_SHARED

START = 10.0
"""Seconds until a node that was started says Hello."""
SET_UP = 1.0
"""Seconds until a node has set up its part in a plan, beside the state that it fetches."""
PARAMETER_BYTES = 4e5
"""Of a layer. A bucket's state has the parameters, two moments and the momentum of exchanges, which are all as large."""
ALONE_SECONDS = 6.8
"""Of a step that one node computes alone (docs/measurements.md)."""


class Simulated(World):
    """``size``: the nodes of each island. ``within_rounds``: islands may begin within rounds. Otherwise nodes wait for the
    exchange."""

    def __init__(self, network: Cluster, length: int, size: int, *, within_rounds: bool) -> None:
        train = {"rounds": length, "steps": 100 * (length + 1), "global_batch": 2 * MICRO_BATCHES, "micro_batch": 2}
        cluster = {"nodes": len(network.nodes), "stages": "auto", "lease": LEASE_SHARED}
        without = {"evaluate_every": 0, "evaluation_samples": 2}
        super().__init__(
            fresh_state(train={**train, **without}, cluster=cluster, checkpoint={"uri": "memory://x", "every": 0})
        )
        self.automatic_standbys = False
        self.length = length
        self._network, self._size, self._within = network, size, within_rounds
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._computing: tuple[int, int] | None = None
        self._copies: dict[str, tuple[int, int]] = {}  # by node with a copy of what islands share: its layers
        self._incarnations = dict.fromkeys(network.ids, 0)
        self._disks: dict[str, dict[int, set[int]]] = {node: {} for node in network.ids}  # by step, the buckets there
        self.deaths = 0

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + seconds, next(self._order), act))

    def go_on(self, until: float) -> None:
        while self._due and self._due[0][0] <= until:
            self.now, _, act = heapq.heappop(self._due)
            act()
        self.now = until

    def begin(self) -> None:
        self._beat()
        for node in self._network.ids:
            self._start(node)

    def _beat(self) -> None:
        for node in list(self.state.members.sessions):
            self.hear(node, heartbeat=wire.Heartbeat())
        self.feed(t.TimePassed())
        self.after(self.state.lease / 8, self._beat)

    def _start(self, node: str) -> None:
        self._incarnations[node] += 1
        layer = plan_pb2.Layer(
            name="layer",
            forward_flops=ALONE_SECONDS * FASTEST / MICRO_BATCHES / 3 / LAYERS,
            parameter_bytes=int(PARAMETER_BYTES),
            activation_bytes=64 * 96 * 4,
        )
        device = wire.Device(kind="cpu", name="a cpu", memory_bytes=1 << 30, flops=FASTEST)
        on_disk = [_files(step, buckets, b"") for step, buckets in self._disks[node].items()]
        said = prepared(layers=[layer] * LAYERS, buckets=LAYERS, training_samples=10**6, on_disk=on_disk)
        self.prepare(node, said, incarnation=self._incarnations[node], device=device)
        if self.heard_by(node)[-1].WhichOneof("message") == "probe":
            peers = [peer.node for peer in self.heard_by(node)[-1].probe.peers]
            number, report = {name: n for n, name in enumerate(self._network.ids)}, wire.LinkReport()
            for one, other in [pair for peer in peers for pair in ((node, peer), (peer, node))]:
                at = number[one], number[other]
                report.links.add(
                    source=one,
                    destination=other,
                    latency_seconds=self._network.latency[at],
                    bandwidth=self._network.bandwidth[at],
                )
            mine = self._network.nodes[number[node]]
            report.up, report.down = mine.up or 0.0, mine.down or 0.0
            self.after(START, partial(self._say, node, self._incarnations[node], wire.NodeMessage(links=report)))

    def kill(self, node: str) -> None:
        self.deaths += 1
        self._copies.pop(node, None)
        self.lose(node)
        self.after(START, partial(self._start, node))

    def _say(self, node: str, incarnation: int, message: wire.NodeMessage) -> None:
        if self._incarnations[node] == incarnation and node in self.state.members.sessions:
            self.hear(node, message)

    # What nodes do, and when

    def feed(self, event: t.Input) -> None:
        super().feed(event)
        phase = self.state.phase
        if not isinstance(phase, Stepping):
            self._computing = None
            return
        at = self.state.ledger.training.generation, phase.step
        if at != self._computing:
            self._computing = at
            self.after(self._step_seconds(phase.step), partial(self._vote_all, at))
        if (wakes := self.state.wakes_at) is not None:
            self.after(max(0.0, wakes - self.now), lambda: self.feed(t.TimePassed()))

    def _step_seconds(self, step: int) -> float:
        plan, workload = self.plan_in_force, self.state.ledger.description.workload.with_rounds()
        numbers = [number for number, name in enumerate(self._network.ids) if name in plan.nodes]
        problem = Problem(self._network.only(numbers), replace(workload, micro_batches=MICRO_BATCHES))
        if self.state.rounds.exchanges(step):
            return max(0.1, exchange_seconds(problem.cluster, workload, plan))
        return price_of_layout(problem, plan, Terms()).step

    def _vote_all(self, at: tuple[int, int]) -> None:
        if self._computing != at:
            return
        generation, step = at
        exchanges, rested = self.state.rounds.exchanges(step), self.state.rounds.rested(step - 1)
        if exchanges:
            for node in list(self._copies):
                self._tell_copied(node, rested, generation)
        for node in self.plan_in_force.nodes:
            if self._computing == at and node in self.state.members.sessions:
                self.vote(node, **({"samples": 0, "loss_sum": 0.0} if exchanges else {}))
        if exchanges and self.state.ledger.training.step == step:
            for node in list(self._copies):
                self._tell_copied(node, step, 0)
        self._on_commit()

    def _on_commit(self) -> None:
        """To be replaced by what else happens."""

    def _tell_copied(self, node: str, step: int, voted: int) -> None:
        session = self.state.members.sessions.get(node)
        if session is not None and session.standby is not None:
            said = wire.StandbyProgress(number=session.standby.number, step=step, voted=voted)
            self.hear(node, standby_progress=said)

    def _answer(self, send: t.Send) -> None:
        node = next((name for name, stream in self.streams.items() if stream == send.stream), "")
        if not node:
            return
        message, say = send.message, partial(self._say, node, self._incarnations[node])
        match message.WhichOneof("message"):
            case "assignment" if node in unpack_plan(message.assignment.plan).nodes:
                generation = message.assignment.generation
                self.after(
                    SET_UP + self._fetching_seconds(node, message.assignment), partial(self._ready, node, generation)
                )
            case "standby" if message.standby.past_last_layer:
                layers = message.standby.first_layer, message.standby.past_last_layer
                size = 0.0 if self._copies.get(node) == layers else 2 * PARAMETER_BYTES * (layers[1] - layers[0])
                self.after(size / self._down(node), partial(self._copied, node, self._incarnations[node], layers))
            case "standby":
                self._copies.pop(node, None)
            case "keep":
                kept = {*message.keep.steps}
                self._disks[node] = {step: files for step, files in self._disks[node].items() if step in kept}
            case "move" if not message.move.folder:
                step, buckets = message.move.step, {part.bucket for part in message.move.parts}
                seconds = 3 * PARAMETER_BYTES * len(buckets) / self._down(node)
                self.after(seconds, partial(self._written, node, self._incarnations[node], step, buckets))
            case "commit":
                self._commit(node, message.commit, say)
            case "test" | "reach":
                super()._answer(send)

    def _commit(self, node: str, commit: wire.Commit, say: Callable[[wire.NodeMessage], None]) -> None:
        plan = self.plan_in_force
        if commit.snapshot and plan.island_of(node) == plan.stages[0].island:
            buckets = {*buckets_of(plan, node)}
            self.after(1.0, partial(self._written, node, self._incarnations[node], commit.step, buckets))
        if commit.pause:
            applied = wire.Applied(generation=commit.generation, step=commit.step, state_digest=b"x" * 32)
            self.after(0.1, partial(say, wire.NodeMessage(applied=applied)))

    def _written(self, node: str, incarnation: int, step: int, buckets: set[int]) -> None:
        if self._incarnations[node] == incarnation:
            self._disks[node].setdefault(step, set()).update(buckets)
            self._say(node, incarnation, wire.NodeMessage(moved=_files(step, buckets, bytes(32))))

    def _down(self, node: str) -> float:
        return self._network.nodes[self._network.ids.index(node)].down or 1.0

    def _copied(self, node: str, incarnation: int, layers: tuple[int, int]) -> None:
        if self._incarnations[node] == incarnation and node in self.state.members.sessions:
            self._copies[node] = layers
            self._tell_copied(node, self.state.rounds.rested(self.state.ledger.training.step), 0)

    def _ready(self, node: str, generation: int) -> None:
        if generation == self.state.ledger.training.generation and node in self.state.members.sessions:
            self._copies.pop(node, None)
            self.plan_ready(node)

    def _fetching_seconds(self, node: str, assigned: wire.Assignment) -> float:
        plan = unpack_plan(assigned.plan)
        stage = plan.stages[plan.stage_of(node) or 0]
        lacks = [
            layer for layer in range(*stage.layers) if assigned.donors and node not in assigned.donors[layer].nodes
        ]
        parts = 4.0  # of the state, each as large as the parameters
        if assigned.takes_moments or 0 < assigned.island_began == assigned.step:
            copied = self._copies.get(node) == stage.layers
            lacks = [*range(*stage.layers)]
            parts = 2.0 * (not copied) + 2.0 * assigned.takes_moments
        return parts * PARAMETER_BYTES * len(lacks) / self._down(node)

    def plan(self) -> None:
        wanted = self.wanted.pop(0)
        outcome: PlanChosen | str | None = carried_on(wanted)
        if outcome is None and self._within:
            outcome = within_round(wanted, lambda: False)
        if outcome is None:
            outcome = self._in_islands(wanted)
        self.after(0.5, partial(self._planned, t.Planned(wanted.number, outcome)))

    def _in_islands(self, wanted: t.PlanWanted) -> PlanChosen:
        """Of this many nodes each, as they were at the beginning. Who is left of one is an island alone."""
        cluster, workload, length = wanted.cluster(), wanted.workload.with_rounds(), wanted.lengths[0]
        each = itertools.groupby(range(len(self._network.ids)), lambda number: number // self._size)
        names = [[self._network.ids[number] for number in numbers] for _, numbers in each]
        here = [[n for n, name in enumerate(cluster.ids) if name in group] for group in names]
        plans = [
            replace(schedule(cluster.only(nodes), workload, evaluations=QUICK).plan, idle=()) for nodes in here if nodes
        ]
        problem = Problem(cluster.without_marks(), workload)
        shares = dealt(MICRO_BATCHES, [1 / island_seconds(problem, plan) for plan in plans])
        shared = [with_share(*pair) for pair in zip(plans, shares, strict=True)]
        plan = joined(renumbered(shared, wanted.islands), 0)
        idle = tuple(name for name in cluster.ids if name not in plan.nodes)
        return PlanChosen(replace(plan, idle=idle), "as at the beginning", length=length)

    def _planned(self, found: t.Planned) -> None:
        self.feed(found)


def _files(step: int, buckets: set[int], digest: bytes) -> wire.Moved:
    parts = [wire.Part(bucket=bucket, size_bytes=SIZE, digest=digest) for bucket in sorted(buckets)]
    return wire.Moved(step=step, parts=parts)


class Dying(Simulated):
    """Kills another node in the middle of each round."""

    def __init__(self, network: Cluster, length: int, size: int, *, within_rounds: bool, deaths: bool) -> None:
        super().__init__(network, length, size, within_rounds=within_rounds)
        self._deaths, self._killed_at = deaths, -1

    def _on_commit(self) -> None:
        step, stride = self.state.ledger.training.step, self.length + 1
        if self._deaths and step % stride == stride // 2 and step != self._killed_at:
            self._killed_at = step
            self.kill(self._network.ids[self.deaths % len(self._network.ids)])


def learnt(world: Simulated) -> float:
    """The steps that one node alone would need to learn as much, by the planner's estimate of the tokens that islands need.
    Samples that are owed are not learnt yet."""
    training, workload = world.state.ledger.training, world.state.ledger.description.workload
    debts, batches = training.debts, training.batches(training.step)
    owed = total(debts.committed.left(batches, MICRO_BATCHES))
    if training.plan is not None:
        gone = debts.of_round.keys() - training.plan.places.keys()
        owed += sum(total(of_step) for island in gone for of_step in debts.of_round[island])
    islands, found = (
        {event.generation: len(event.plan.islands) for event in world.events(ev.PlanAdopted)},
        dict[int, float](),
    )
    for event in world.log:
        if isinstance(event, ev.StepCommitted) and not event.exchange:
            found[event.step] = 1 / tokens_needed(islands[event.generation], workload, world.length)
        if isinstance(event, ev.RolledBack):
            found = {step: worth for step, worth in found.items() if step <= event.step}
    return sum(found.values()) * (1 - owed / MICRO_BATCHES / max(1, len(found)))


def trained_in(world: Dying, seconds: float) -> Dying:
    """After these seconds of training."""
    world.begin()
    while not world.events(ev.PlanStarted):
        world.go_on(world.now + 1.0)
    world.go_on(world.now + seconds)
    return world


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--lines", nargs="+", default=["1/1", "10/10"])
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    seconds = options.minutes * 60
    alone = seconds / ALONE_SECONDS
    for line, size in itertools.product(options.lines, options.sizes):
        network, rows = homes(options.nodes, *map(float, line.split("/"))), [Row("one node alone", alone, "steps")]
        for name, within, deaths in (
            ("no deaths", False, False),
            ("nodes wait for the exchange", False, True),
            ("islands begin within rounds", True, True),
        ):
            world = trained_in(Dying(network, options.rounds, size, within_rounds=within, deaths=deaths), seconds)
            steps, back = learnt(world), len(world.events(ev.RolledBack))
            happened = f"{world.deaths} deaths, {back} times back to a snapshot" if deaths else ""
            rows.append(Row(", ".join(filter(None, (name, happened))), steps, "steps", "alone", steps / alone))
        title = f"{options.nodes} nodes, {line} Mbit/s, islands of {size}, rounds of {options.rounds}"
        show(title, rows, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
