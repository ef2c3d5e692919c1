"""A coordinator without sockets, disk or clock, and nodes that answer as told."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from dtfm.coordinator.config.run_file import parse_run
from dtfm.coordinator.core import transition as t
from dtfm.coordinator.core.state import TOGETHER_LEASES, Gathering, PlanChosen, Standing, State
from dtfm.coordinator.core.tick import tick
from dtfm.coordinator.log.events import Event, RunStarted
from dtfm.coordinator.log.ledger import Ledger, fold
from dtfm.protos import PROTOCOL_VERSION, plan_pb2
from dtfm.protos import control_pb2 as wire
from dtfm.protos.credentials import make_key, signing_request
from dtfm.scheduler.model.plan import Plan, Route, Stage

E = TypeVar("E")

LAYERS = 4
BUCKETS = 4
SIGNING_REQUEST = signing_request(make_key())
DIGEST = b"state at some step"
LEASE = 10.0
START = 100.0

RUN: dict[str, Any] = {
    "train": {"steps": 3, "global_batch": 8, "micro_batch": 2, "evaluate_every": 2, "evaluation_samples": 8},
    "cluster": {"nodes": 2, "stages": 2, "lease": LEASE},
    "checkpoint": {"uri": "memory://checkpoints", "every": 2},
}


def run_table(**changes: dict[str, Any]) -> dict[str, Any]:
    """RUN with some keys of its tables changed."""
    return {name: {**table, **changes.get(name, {})} for name, table in RUN.items()}


def fresh_state(ledger: Ledger | None = None, /, **changes: dict[str, Any]) -> State:
    run = parse_run(run_table(**changes), "the test")
    ledger = ledger or fold([RunStarted("run-id", run.model_dump(mode="json"))])
    return State(run=run, message=run.message(ledger.run_id), ledger=ledger, phase=Gathering(START, ""))


def hello(node: str, /, **changes: Any) -> wire.NodeMessage:
    fields = {
        "protocol_version": PROTOCOL_VERSION,
        "node": node,
        "incarnation": 1,
        "address": "10.0.0.1:7000",
        "device": wire.Device(kind="cpu", name="a cpu", memory_bytes=1 << 33, flops=1e11),
        "signing_request": SIGNING_REQUEST,
    }
    return wire.NodeMessage(hello=wire.Hello(**{**fields, **changes}))


def prepared(micro_batches: int = 4, **changes: Any) -> wire.NodeMessage:
    layer = plan_pb2.Workload.Layer(name="layer", forward_flops=1e9, parameter_bytes=1 << 20, activation_bytes=1 << 16)
    fields = {
        "workload": plan_pb2.Workload(
            layers=[layer] * LAYERS, micro_batches=micro_batches, optimizer_bytes_per_parameter_byte=2
        ),
        "data_fingerprint": b"fingerprint",
        "training_samples": 100,
        "evaluation_samples": 10,
        "unigram_entropy": 3.0,
        "tokens_per_sample": 16,
        "buckets": BUCKETS,
    }
    return wire.NodeMessage(prepared=wire.Prepared(**{**fields, **changes}))


def links(node: str, peers: Iterable[str]) -> wire.NodeMessage:
    both = [pair for peer in peers for pair in ((node, peer), (peer, node))]
    return wire.NodeMessage(
        links=wire.LinkReport(
            links=[wire.LinkReport.Link(source=a, destination=b, latency_seconds=0.001, bandwidth=1e9) for a, b in both]
        )
    )


def two_stages(nodes: Iterable[str], micro_batches: int = 4) -> Plan:
    """Nodes dealt in order of name to two stages; with one node, one stage."""
    names = sorted(nodes)
    cut = (len(names) + 1) // 2
    groups = (names[:cut], names[cut:]) if len(names) > 1 else (names,)
    bounds = (0, LAYERS // 2, LAYERS) if len(groups) > 1 else (0, LAYERS)
    stages = tuple(Stage((bounds[i], bounds[i + 1]), tuple(group)) for i, group in enumerate(groups))
    route = Route(tuple(group[-1] for group in groups), micro_batches)
    return Plan(0, stages, (route,))


class World:
    """``log`` is what is in the store, ``said`` what each node was told (streams are named by their numbers),
    ``certified`` the nodes that got a certificate, and by which request."""

    def __init__(self, state: State | None = None, planner: Callable[[Iterable[str]], Plan | str] = two_stages) -> None:
        self.state = state or fresh_state()
        self.start = self.state.ledger
        self.log: list[Event] = []
        self.now = START
        self.exit_code: int | None = None
        self.planner = planner
        self.automatic_planning = True
        self.automatic_copying = True
        self.wanted: list[t.PlanWanted] = []
        self.manifests: list[t.WriteManifest] = []
        self.answers: list[t.AnswerPlanNow] = []
        self.hung_up: set[int] = set()
        self.certified: list[tuple[str, bytes]] = []
        self.said: dict[int, list[wire.CoordinatorMessage]] = {}
        self.streams: dict[str, int] = {}
        self._next_stream = 0

    def feed(self, event: t.Input) -> None:
        self.state, commands = tick(self.state, event, self.now)
        copies: list[t.Send] = []
        for command in commands:
            match command:
                case t.Append():
                    self.log.append(command.event)
                case t.Send():
                    self.said.setdefault(command.stream, []).append(command.message)
                    copies.append(command)
                case t.Admit():
                    welcome = wire.CoordinatorMessage(welcome=command.welcome)
                    self.said.setdefault(command.stream, []).append(welcome)
                    self.certified.append((command.node, command.request))
                case t.HangUp():
                    self.hung_up.add(command.stream)
                case t.PlanWanted():
                    self.wanted.append(command)
                case t.WriteManifest():
                    self.manifests.append(command)
                case t.AnswerPlanNow():
                    self.answers.append(command)
                case t.Stop():
                    self.exit_code = command.exit_code
                case t.Log():
                    pass
        for copy in copies if self.automatic_copying else ():
            self._copy(copy)
        while self.automatic_planning and self.wanted:
            self.plan()

    def _copy(self, send: t.Send) -> None:
        """Who is asked to copy state in advance has it at once."""
        prefetch = send.message.prefetch
        if prefetch.past_last_layer:
            done = wire.Prefetched(number=prefetch.number, step=self.state.ledger.step)
            self.feed(t.Heard(send.stream, wire.NodeMessage(prefetched=done)))

    def plan(self) -> None:
        """Answers the planner's oldest question."""
        wanted = self.wanted.pop(0)
        found = self.planner(wanted.cluster.ids)
        outcome = found if isinstance(found, str) else PlanChosen(found, "as scripted", 1.0, 0.5)
        self.feed(t.Planned(wanted.number, outcome))

    def greet(self, node: str, /, shows_token: bool = True, **changes: Any) -> int:
        self._next_stream += 1
        stream = self._next_stream
        self.streams[node] = stream
        self.feed(t.Greeted(stream, hello(node, **changes), shows_token))
        return stream

    def hear(self, node: str, message: wire.NodeMessage | None = None, **fields: Any) -> None:
        self.feed(t.Heard(self.streams[node], message or wire.NodeMessage(**fields)))

    def join(self, *nodes: str, **changes: Any) -> None:
        """Each comes, prepares, and reports its links to those it is told to probe; then a moment passes without another."""
        for node in nodes:
            self.greet(node, **changes)
            self.hear(node, prepared())
            last = self.heard_by(node)[-1]
            if last.WhichOneof("message") == "probe":
                self.hear(node, links(node, [peer.node for peer in last.probe.peers]))
        if any(session.standing is Standing.ARRIVED for session in self.state.sessions.values()):
            self.now += self.state.lease * TOGETHER_LEASES
            self.feed(t.TimePassed())

    def lose(self, node: str, reason: str = "its connection broke") -> None:
        self.feed(t.StreamClosed(self.streams[node], reason))

    def wait(self, seconds: float, beating: Iterable[str] = ()) -> None:
        """Time passes in heartbeats; ``beating`` nodes give signs of life."""
        beating = list(beating)
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + self.state.heartbeat)
            for node in beating:
                self.hear(node, heartbeat=wire.Heartbeat())
            self.feed(t.TimePassed())

    def settle(self) -> None:
        """All nodes of the plan say that they are ready for it."""
        plan = self.plan_in_force
        for node in plan.nodes:
            self.hear(node, plan_ready=wire.PlanReady(generation=plan.generation))

    def vote(self, node: str, **changes: Any) -> None:
        plan = self.plan_in_force
        last = plan.stages[-1].replicas
        fields = {
            "generation": plan.generation,
            "step": self.state.ledger.step + 1,
            "squared_gradient_norm": 2.0,
            "loss_sum": 4.0 if node == last[-1] else 0.0,
            "samples": 8 if node == last[-1] else 0,
            "state_digest": DIGEST,
        }
        self.hear(node, step_ready=wire.StepReady(**{**fields, **changes}))
        if self.automatic_copying and self.state.wakes_at is not None:
            self.keep_up()

    def keep_up(self) -> None:
        """Who copies has the gradients of the step in hand."""
        generation, step = self.state.ledger.generation, self.state.ledger.step
        copyings = {node: s.copying for node, s in self.state.sessions.items() if s.copying is not None}
        for node, copying in copyings.items():
            if copying.near and not copying.ended:
                self.hear(node, prefetched=wire.Prefetched(number=copying.number, step=step, voted=generation))

    def step(self) -> None:
        """All vote, and what copies there are keep up, or are waited for as long as they may be."""
        for node in self.plan_in_force.nodes:
            self.vote(node)
        if (until := self.state.wakes_at) is not None:
            self.now = until
            self.feed(t.TimePassed())

    def fail_step(self, node: str, problem: wire.StepProblem, **changes: Any) -> None:
        fields = {
            "generation": self.state.ledger.generation,
            "step": self.state.ledger.step + 1,
            "sentence": "scripted",
        }
        self.hear(node, step_failed=wire.StepFailed(problem=problem, **{**fields, **changes}))

    def evaluate(self) -> None:
        plan, step = self.plan_in_force, self.state.ledger.step
        node = plan.routes[0].nodes[-1]
        self.hear(node, evaluated=wire.Evaluated(generation=plan.generation, step=step, loss_sum=16.0, samples=8))

    def apply(self) -> None:
        plan, step = self.plan_in_force, self.state.ledger.step
        for node in plan.nodes:
            self.hear(node, applied=wire.Applied(generation=plan.generation, step=step, state_digest=DIGEST))

    def write_buckets(self, buckets: Iterable[int] = range(BUCKETS)) -> None:
        step = self.state.ledger.step
        node = self.plan_in_force.nodes[0]
        for bucket in buckets:
            written = wire.BucketWritten(
                step=step, bucket=bucket, file=f"bucket-{bucket:05d}.safetensors", size_bytes=10, digest=DIGEST
            )
            self.hear(node, bucket_written=written)

    def save(self) -> None:
        """The checkpoint of the last committed step becomes whole."""
        self.write_buckets()
        self.feed(t.ManifestDone(self.manifests[-1].step, ""))

    def finish_run(self) -> None:
        """Trains what is left of the run, from a plan that has begun and lasts."""
        while (last := self.state.ledger.step) < self.state.run.train.steps:
            self.step()
            assert self.state.ledger.step == last + 1, f"step {last + 1} does not come about: {self.state.phase}"
        self.evaluate()
        self.apply()
        self.save()

    @property
    def plan_in_force(self) -> Plan:
        assert self.state.ledger.plan is not None
        return self.state.ledger.plan

    def heard_by(self, node: str) -> list[wire.CoordinatorMessage]:
        return self.said.get(self.streams[node], [])

    def last_to(self, node: str, kind: str) -> Any:
        """The last message of this kind that the node was told."""
        return getattr([m for m in self.heard_by(node) if m.WhichOneof("message") == kind][-1], kind)

    def kinds_to(self, node: str) -> list[str]:
        return [str(message.WhichOneof("message")) for message in self.heard_by(node)]

    def events(self, kind: type[E]) -> list[E]:
        return [event for event in self.log if isinstance(event, kind)]

    def names(self) -> list[str]:
        """Names of the logged events, in order."""
        return [event.event for event in self.log]

    def refolded(self) -> Ledger:
        return fold(self.log, self.start)


def training(*nodes: str, **changes: dict[str, Any]) -> World:
    """A world whose nodes compute step 1."""
    names = nodes or ("a", "b")
    changes = {**changes, "cluster": {"nodes": len(names), **changes.get("cluster", {})}}
    world = World(fresh_state(**changes))
    world.join(*names)
    world.settle()
    return world


def refusal_of(world: World, stream: int) -> wire.Refusal:
    """With which the coordinator ended it."""
    assert stream in world.hung_up
    return world.said[stream][-1].refusal
