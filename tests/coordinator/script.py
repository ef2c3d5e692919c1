"""A coordinator without sockets, disk or clock, and nodes that answer as the test tells them to.

How to write such a test: take a World, or a World that trains already (``training("a", "b")``), and let things happen to it one
after the other. ``join``, ``vote``, ``lose`` and the like play one node. ``settle``, ``step``, ``apply`` and ``save`` play all
of them. ``wait`` lets time pass. Then check the results: ``last_to`` and ``kinds_to`` give the messages to a node, ``events``
the log, and ``state`` the coordinator's knowledge.

The planner and the standbys answer immediately. To choose the planner's answer, set ``planner``. To choose its time, turn
``automatic_planning`` off and call ``plan``; a plan that can be carried on is carried on immediately all the same. To choose the
standbys' reports, turn ``automatic_standbys`` off, or begin with ``with_standbys`` (standbys.py). With ``plans_within_rounds``
the planner's plans may begin within a round. All nodes can dial each other, unless you turn ``automatic_dialling`` off. Nodes
that are out of use pass their tests, unless you turn ``automatic_tests`` off.
Scripts about snapshots on disks are in snapshots.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

from dtfm.coordinator.core import transition as t
from dtfm.coordinator.core.phases import Gathering
from dtfm.coordinator.core.refusal import Refused
from dtfm.coordinator.core.state.planner import PlanChosen
from dtfm.coordinator.core.state.session import Admission
from dtfm.coordinator.core.state.state import State
from dtfm.coordinator.core.tick import tick
from dtfm.coordinator.core.timeouts import HEARTBEAT_LEASES, TOGETHER_LEASES
from dtfm.coordinator.log.events import Enrolled, Event, RunResumed, RunStarted
from dtfm.coordinator.log.ledger import Ledger, fold
from dtfm.coordinator.service.planning.planner import carried_on
from dtfm.coordinator.store.store import Record
from dtfm.coordinator.view.so_far import SoFar
from dtfm.protos import PROTOCOL_VERSION, control_pb2 as wire, plan_pb2
from dtfm.protos.run_file.run_file import parse_run
from dtfm.scheduler.model.plan import Plan, Stage, from_routes
from tests.coordinator import honest_work
from tests.coordinator.answers import (
    DIGEST,
    FILE_DIGEST,
    answer,
    bucket_layout,
    buckets_of,
    evaluated,
    last_busy,
    links,
    states_of,
    stored,
    uploaded,
    vote,
)

E = TypeVar("E")

LAYERS = 4
BUCKETS = 4
MANIFEST = "5a" * 32
LEASE = 10.0
START = 100.0

RUN: dict[str, Any] = {
    "train": {
        "steps": 3,
        "global_batch": 8,
        "micro_batch": 2,
        "precision": "fp32",
        "evaluate_every": 2,
        "evaluation_samples": 8,
    },
    "cluster": {"nodes": 2, "stages": 2, "lease": LEASE},
    "checkpoint": {"uri": "memory://checkpoints", "every": 2},
}


LONG: dict[str, dict[str, Any]] = {"train": {"steps": 500, "evaluate_every": 0}, "checkpoint": {"every": 0}}
"""Changes to RUN: many steps. No evaluation or checkpoint follows them."""


def run_table(**changes: dict[str, Any]) -> dict[str, Any]:
    """RUN with some keys of its tables changed."""
    return {name: {**RUN.get(name, {}), **changes.get(name, {})} for name in RUN.keys() | changes.keys()}


def fresh_state(ledger: Ledger | None = None, /, **changes: dict[str, Any]) -> State:
    """The state of a coordinator that has just started, with an empty log or with this ledger; ``changes`` are of RUN."""
    run = parse_run(run_table(**changes), "the test")
    ledger = ledger or fold([RunStarted("run-id", run.model_dump(mode="json"))])
    return State(
        run=run, message=run.message(ledger.run_id), ledger=ledger, phase=Gathering(START, ""), secret=bytes(32)
    )


def hello(node: str, /, **changes: Any) -> wire.NodeMessage:
    """A valid Hello, with some of its fields changed."""
    fields = {
        "protocol_version": PROTOCOL_VERSION,
        "node": node,
        "incarnation": 1,
        "candidates": ["10.0.0.1:7000"],
        "device": wire.Device(kind="cpu", name="a cpu", memory_bytes=1 << 33, flops=1e11),
    }
    return wire.NodeMessage(hello=wire.Hello(**{**fields, **changes}))


def prepared(**changes: Any) -> wire.NodeMessage:
    """A valid Prepared, with some of its fields changed."""
    layer = plan_pb2.Layer(name="layer", forward_flops=1e9, parameter_bytes=1 << 20, activation_bytes=1 << 16)
    fields: dict[str, Any] = {
        "layers": [layer] * LAYERS,
        "data_fingerprint": b"fingerprint",
        "training_samples": 100,
        "evaluation_samples": 10,
        "unigram_entropy": 3.0,
        "tokens_per_sample": 16,
        "buckets": BUCKETS,
    }
    fields = {**fields, **changes}
    layouts = b"".join(bucket_layout(bucket) for bucket in range(fields["buckets"]))
    return wire.NodeMessage(prepared=wire.Prepared(**{"layouts": layouts, **fields}))


def two_stages(nodes: Iterable[str], micro_batches: int = 4) -> Plan:
    """The first half of the nodes, by name, on the first stage and the others on the second; one node alone has one stage."""
    names = sorted(nodes)
    cut = (len(names) + 1) // 2
    groups = (names[:cut], names[cut:]) if len(names) > 1 else (names,)
    bounds = (0, LAYERS // 2, LAYERS) if len(groups) > 1 else (0, LAYERS)
    stages = [Stage((bounds[i], bounds[i + 1]), tuple(group), ()) for i, group in enumerate(groups)]
    return from_routes(0, stages, [([group[-1] for group in groups], micro_batches)])


class World:
    """A coordinator and its nodes.

    ``log``: the events, as the store would have them. ``said``: the messages that went out, by the stream's number; ``streams``
    has the number for each node. ``told``: the messages about how the run fares, which are not in ``said``. ``certified``: the
    nodes that got a certificate. ``wanted``: the questions that the planner has not answered yet. ``granted`` and ``refusals``:
    the answers to requests for access, by ticket.
    """

    def __init__(self, state: State | None = None, planner: Callable[[Iterable[str]], Plan | str] = two_stages) -> None:
        self.state = state or fresh_state()
        self.start = self.state.ledger
        self.log: list[Event] = []
        self.now = START
        self.planner = planner
        self.automatic_planning = True
        self.plans_within_rounds = False
        self.plans_with_moments = True
        self.automatic_standbys = True
        self.automatic_dialling = True
        self.automatic_audits = True
        self.automatic_tests = True
        self.wanted: list[t.PlanWanted] = []
        self.manifests: list[t.WriteManifest] = []
        self.tidied: list[t.TidyCheckpoints] = []
        self.hung_up: set[int] = set()
        self.certified: list[str] = []
        self.refusals: dict[int, Refused] = {}
        self.granted: dict[int, t.Granted] = {}
        self.said: dict[int, list[wire.CoordinatorMessage]] = {}
        self.told: dict[int, list[wire.RunStatus]] = {}
        self.streams: dict[str, int] = {}
        self._next_stream = 0

    def feed(self, event: t.Input) -> None:
        """One tick with this input, and what standbys and the planner answer to it."""
        self.state, ready = tick(self.state, event, self.now)
        self.log += ready.entries
        sent: list[t.Send] = []
        for command in ready.commands:
            match command:
                case t.Send() if self.automatic_dialling and command.message.WhichOneof("message") == "reach":
                    sent.append(command)
                case t.Send() if command.message.WhichOneof("message") == "status":
                    self.told.setdefault(command.stream, []).append(command.message.status)
                case t.Send():
                    self.said.setdefault(command.stream, []).append(command.message)
                    sent.append(command)
                case t.Certify() if command.welcome is not None:
                    welcome = wire.CoordinatorMessage(welcome=command.welcome)
                    self.said.setdefault(command.stream, []).append(welcome)
                    self.certified.append(command.node)
                case t.Certify():
                    self.certified.append(command.node)
                case t.Answer():
                    if isinstance(command.reply, Refused):
                        self.refusals[command.ticket] = command.reply
                    else:
                        self.granted[command.ticket] = command.reply
                case t.HangUp():
                    self.hung_up.add(command.stream)
                case t.PlanWanted():
                    self.wanted.append(command)
                case t.WriteManifest():
                    self.manifests.append(command)
                case t.TidyCheckpoints():
                    self.tidied.append(command)
                case t.Log():
                    pass
        for send in sent:
            self._answer(send)
        if not self.automatic_planning and self.wanted and carried_on(self.wanted[-1]) is not None:
            del self.wanted[:-1]  # a new question replaces those before
        while self.wanted and (self.automatic_planning or carried_on(self.wanted[0]) is not None):
            self.plan()

    def _answer(self, send: t.Send) -> None:
        """Plays a node's immediate reaction. A new standby has the state. A node that is to dial others reaches them. An auditor
        finds all work right. A tested node works."""
        kind = send.message.WhichOneof("message")
        if kind == "test" and self.automatic_tests:
            self.feed(t.Heard(send.stream, wire.NodeMessage(timed=wire.Timed(flops=1e11))))
        if kind == "audit" and self.automatic_audits:
            self.feed(t.Heard(send.stream, honest_work.audited(send.message.audit)))
        if (kind == "standby" and self.automatic_standbys) or (kind == "reach" and self.automatic_dialling):
            said = answer("", send.message, wire.Assignment(step=self.state.ledger.training.step))
            if said is not None:
                self.feed(t.Heard(send.stream, said))

    def plan(self) -> None:
        """The planner answers the oldest question."""
        wanted = self.wanted.pop(0)
        outcome: PlanChosen | str | None = carried_on(wanted)
        if outcome is None:
            assert self.state.planner.asked is not None
            found = self.planner(sorted(node for node, _ in self.state.planner.asked.question.nodes))
            outcome = found if isinstance(found, str) else self._chosen(found, wanted)
        self.feed(t.Planned(wanted.number, outcome))

    def _chosen(self, found: Plan, wanted: t.PlanWanted) -> PlanChosen:
        grows = wanted.incumbent is not None and not {*found.nodes} <= {*wanted.incumbent.nodes}
        if self.plans_within_rounds and wanted.steps_left and grows:
            plan, with_moments = replace(found, rounds=self.state.rounds), self.plans_with_moments
            return PlanChosen(plan, "as scripted", 1.0, within_round=True, with_moments=with_moments)
        return PlanChosen(found, "as scripted", 1.0, 0.5, wanted.lengths[0])

    def belong_together(self, *nodes: str, key: str = "their key", believed: bool = False) -> None:
        """These nodes have one key. Of others no key is known, so that each is a party of its own. ``believed``: their word
        decides."""
        events = [Enrolled(node, "node", key, "", believed) for node in nodes]
        self.state = replace(self.state, ledger=fold(events, self.state.ledger))
        self.log += events

    def stick_to_plan(self) -> None:
        """From now on the planner answers with the plan in force, as long as all its nodes are there."""
        plan, planner = self.plan_in_force, self.planner
        self.planner = lambda ids: plan if set(plan.nodes) <= set(ids) else planner(ids)

    def greet(self, node: str, /, caller: str | None = None, seen: str = "", **changes: Any) -> int:
        """The node opens a stream and says Hello, with some of its fields changed. ``caller``: the name whose key it has, if not
        its own. ``seen``: the address that it comes from. Returns the stream's number."""
        self._next_stream += 1
        stream = self._next_stream
        self.streams[node] = stream
        greeting = hello(node, **changes)
        self.feed(t.Greeted(stream, greeting, greeting.hello.node if caller is None else caller, seen))
        return stream

    def hear(self, node: str, message: wire.NodeMessage | None = None, **fields: Any) -> None:
        """The coordinator hears this message from the node, or a NodeMessage of these fields."""
        self.feed(t.Heard(self.streams[node], message or wire.NodeMessage(**fields)))

    def prepare(self, node: str, said: wire.NodeMessage | None = None, /, **changes: Any) -> int:
        """The node says Hello, is welcomed and says Prepared; it has still to measure its links. Returns the stream's number."""
        stream = self.greet(node, **changes)
        self.hear(node, said or prepared())
        return stream

    def join(self, *nodes: str, **changes: Any) -> None:
        """Each node prepares, and reports the links that it is told to probe. Then the time for others to join passes, and all
        nodes are ready."""
        for node in nodes:
            self.prepare(node, **changes)
            self.report_links(node)
        if any(session.admission is Admission.ARRIVED for session in self.state.members.sessions.values()):
            self.now += self.state.lease * TOGETHER_LEASES
            self.feed(t.TimePassed())

    def report_links(self, node: str) -> None:
        """The node reports the links that it was just told to probe, if any."""
        last = self.heard_by(node)[-1]
        if last.WhichOneof("message") == "probe":
            self.hear(node, links(node, [peer.node for peer in last.probe.peers]))

    def lose(self, node: str, reason: str = "its connection broke") -> None:
        """The node's stream ends."""
        self.feed(t.StreamClosed(self.streams[node], reason))

    def wait(self, seconds: float, beating: Iterable[str] = ()) -> None:
        """Time passes, and the ``beating`` nodes send their heartbeats."""
        beating = list(beating)
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + self.state.lease * HEARTBEAT_LEASES)
            for node in beating:
                self.hear(node, heartbeat=wire.Heartbeat())
            self.feed(t.TimePassed())

    def without_deadline(self) -> None:
        """Removes the deadline of the current phase, for a test about something else that takes long."""
        assert not isinstance(self.state.phase, Gathering)
        self.state = replace(self.state, phase=replace(self.state.phase, deadline=math.inf))

    def settle(self) -> None:
        """All nodes of the plan say that they are ready for it."""
        plan = self.plan_in_force
        for node in plan.nodes:
            self.plan_ready(node, generation=plan.generation)

    def plan_ready(self, node: str, **changes: Any) -> None:
        """The node says that it is ready for the plan in force, with some fields changed."""
        states = states_of(self.plan_in_force, node)
        fields = {"generation": self.state.ledger.training.generation, "states": states, **changes}
        self.hear(node, plan_ready=wire.PlanReady(**fields))

    def fail_plan(self, node: str, problem: str = "scripted", **changes: Any) -> None:
        """The node says that it cannot take its part in the plan in force."""
        fields = {"generation": self.state.ledger.training.generation, "problem": problem, **changes}
        self.hear(node, plan_failed=wire.PlanFailed(**fields))

    def vote(self, node: str, **changes: Any) -> None:
        """The node votes for the current step, with some fields of its vote changed."""
        said = vote(self.plan_in_force, node, self.state.ledger.training.step + 1)
        said.loss_sum = 0.5 * said.samples
        if self.state.run.trust.audits:
            exchanges = self.state.rounds.exchanges(said.step)
            said.MergeFrom(wire.StepReady(**honest_work.commitments(self.plan_in_force, node, exchanges=exchanges)))
        for field in changes:
            said.ClearField(field)
        said.MergeFrom(wire.StepReady(**changes))
        self.hear(node, step_ready=said)
        if self.automatic_standbys and self.state.wakes_at is not None:
            self.keep_up()

    def audit(self, node: str, **changes: Any) -> None:
        """The node answers its last audit: all is right, except the given changes."""
        self.hear(node, honest_work.audited(self.last_to(node, "audit"), **changes))

    def keep_up(self) -> None:
        """All standbys that have caught up report that they have the gradients of the current step."""
        generation, step = self.state.ledger.training.generation, self.state.ledger.training.step
        for node, session in list(self.state.members.sessions.items()):
            standby = session.standby
            if standby is not None and standby.caught_up is not None and not standby.ended:
                report = wire.StandbyProgress(number=standby.number, step=step, voted=generation)
                self.hear(node, standby_progress=report)

    def step(self) -> None:
        """All nodes of the plan vote. If the commit waits for standbys that do not report, the time for that passes."""
        for node in self.plan_in_force.nodes:
            self.vote(node)
        if (until := self.state.wakes_at) is not None:
            self.now = until
            self.feed(t.TimePassed())

    def fail_step(self, node: str, problem: wire.StepProblem, **changes: Any) -> None:
        """The node says that it cannot do the current step."""
        fields = {
            "generation": self.state.ledger.training.generation,
            "step": self.state.ledger.training.step + 1,
            "sentence": "scripted",
        }
        self.hear(node, step_failed=wire.StepFailed(problem=problem, **{**fields, **changes}))

    def evaluate(self, *nodes: str, loss: float = 2.0) -> None:
        """The nodes, by default all that should, report the held-out loss after the last commit, if it is awaited."""
        plan, step = self.plan_in_force, self.state.ledger.training.step
        if (evaluation := self.state.evaluation) is None:
            self.hear(last_busy(plan), evaluated(plan.generation, step))
            return
        for node in nodes or sorted(evaluation.expected):
            self.hear(node, evaluated(plan.generation, step, [loss] * len(evaluation.expected[node])))

    def apply(self) -> None:
        """All nodes of the plan say that they have applied the last commit, as they do before a pause."""
        plan, step = self.plan_in_force, self.state.ledger.training.step
        for node in plan.nodes:
            self.hear(node, applied=wire.Applied(generation=plan.generation, step=step, state_digest=DIGEST))

    def write_snapshot(self, *nodes: str, problem: str = "") -> None:
        """Each of the nodes, by default all of the plan, has written the state after the last commit to its disk."""
        plan, step = self.plan_in_force, self.state.ledger.training.step
        for node in nodes or self.plan_in_force.nodes:
            files = dict.fromkeys(buckets_of(plan, node) if not problem else (), (10, FILE_DIGEST))
            self.hear(node, stored(step, files, problem))

    def send_files(self, *nodes: str, problem: str = "") -> None:
        """Each of the nodes, by default all that should, has sent its files to the checkpoint."""
        upload = self.state.safekeeping.upload
        assert upload is not None
        moments = bytes(64) if self.state.run.checkpoint.weights else b""
        sending = {node: sorted(move.buckets) for node, move in sorted(upload.moves.by_node.items()) if move.buckets}
        for node in nodes or sending:
            files = dict.fromkeys(sending.get(node, ()) if not problem else (), (10, FILE_DIGEST))
            self.hear(node, uploaded(upload.step, files, problem, moments=moments))

    def write_checkpoint(self, problem: str = "") -> None:
        """The state after the last commit is on the nodes' disks, and in the checkpoint's files, or nobody can send them."""
        if self.state.safekeeping.snapshot is not None:
            self.write_snapshot()
        while (upload := self.state.safekeeping.upload) is not None and upload.moves.under_way:
            self.send_files(problem=problem)

    def save(self) -> None:
        """The checkpoint of the last committed step becomes whole."""
        self.write_checkpoint()
        self.feed(t.ManifestDone(self.manifests[-1].step, "", digest=MANIFEST))

    def finish_run(self) -> None:
        """Plays the rest of the run, from the current step on."""
        while (last := self.state.ledger.training.step) < self.state.run.train.steps:
            self.step()
            assert self.state.ledger.training.step == last + 1, (
                f"step {last + 1} does not come about: {self.state.phase}"
            )
        self.evaluate()
        self.apply()
        self.save()

    @property
    def planned_now(self) -> dict[int, wire.PlanNowReply]:
        """By ticket, what those were answered who asked for a plan."""
        return {ticket: reply for ticket, reply in self.granted.items() if isinstance(reply, wire.PlanNowReply)}

    @property
    def plan_in_force(self) -> Plan:
        assert self.state.ledger.training.plan is not None
        return self.state.ledger.training.plan

    def donors_to(self, node: str) -> list[list[str]]:
        """Who gives the node its state under the last plan that it was sent: the nodes, by bucket."""
        return [list(donors.nodes) for donors in self.last_to(node, "assignment").donors]

    @property
    def exit_code(self) -> int | None:
        return self.state.exit_code

    def heard_by(self, node: str) -> list[wire.CoordinatorMessage]:
        """All that the node was sent on its newest stream."""
        return self.said.get(self.streams[node], [])

    def last_to(self, node: str, kind: str) -> Any:
        """The last message of this kind that the node was sent."""
        return getattr([m for m in self.heard_by(node) if m.WhichOneof("message") == kind][-1], kind)

    def kinds_to(self, node: str) -> list[str]:
        """The kinds of the messages that the node was sent, in order."""
        return [str(message.WhichOneof("message")) for message in self.heard_by(node)]

    def events(self, kind: type[E]) -> list[E]:
        """The logged events of this kind."""
        return [event for event in self.log if isinstance(event, kind)]

    def names(self) -> list[str]:
        """Names of the logged events, in order."""
        return [event.event for event in self.log]

    def refolded(self) -> Ledger:
        """The ledger as a restart would find it."""
        return fold(self.log, self.start)

    @property
    def whole_log(self) -> list[Event]:
        """The log, with the event that began the run."""
        return [RunStarted(self.start.run_id, dict(self.start.run)), *self.log]

    @property
    def records(self) -> list[Record]:
        """The whole log as the store returns it, an event a second."""
        return [Record(number, 1000.0 + number, event) for number, event in enumerate(self.whole_log, 1)]

    @property
    def view(self) -> SoFar:
        """The messages to viewers."""
        view = SoFar()
        for record in self.records:
            view.add(record)
        return view


def training(*nodes: str, **changes: dict[str, Any]) -> World:
    """A world where these nodes, by default a and b, compute step 1 of a run with these changes."""
    names = nodes or ("a", "b")
    changes = {**changes, "cluster": {"nodes": len(names), **changes.get("cluster", {})}}
    world = World(fresh_state(**changes))
    world.join(*names)
    world.settle()
    return world


def restarted(before: World, **changes: dict[str, Any]) -> World:
    """The next coordinator process, on the log that the one before left."""
    resumed = RunResumed("from the log", dict(before.state.ledger.run), dict(before.state.ledger.file))
    return World(fresh_state(fold([resumed], before.refolded()), **changes))


def aborted_after_twenty_steps() -> World:
    """Four nodes, two replicas for each stage; the last event is the abort of step 21."""
    world = training("a", "b", "c", "d", train={"steps": 30}, checkpoint={"every": 20})
    for _ in range(20):
        world.now += 1.0
        world.step()
    world.evaluate()
    world.save()
    world.fail_step("a", wire.NON_FINITE)
    return world


def refusal_of(world: World, stream: int) -> wire.Refusal:
    """The refusal that ended the stream."""
    assert stream in world.hung_up
    return world.said[stream][-1].refusal
