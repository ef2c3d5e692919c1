"""One tick: what goes in, what comes out, and the state as it becomes in between."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from dtfm.coordinator.core.findings import Finding
from dtfm.coordinator.core.phases import FOLLOWS, Phase
from dtfm.coordinator.core.refusal import Refused
from dtfm.coordinator.core.state import Members, PlanChosen, Planner, Safekeeping, Session, State
from dtfm.coordinator.log.events import CheckpointFile, Event, NodeRefused
from dtfm.protos import control_pb2 as wire
from dtfm.protos.run_file.run_file import RunFile
from dtfm.scheduler.model.cluster import Cluster
from dtfm.scheduler.model.plan import Plan
from dtfm.scheduler.model.workload import Workload

# Inputs.


@dataclass(frozen=True, slots=True)
class Greeted:
    """The first message of a stream. ``caller``: the name to which the key belongs that made the call; ``seen``: the IP address
    from which it came, empty if not known or not a node's."""

    stream: int
    message: wire.NodeMessage
    caller: str
    seen: str = ""


@dataclass(frozen=True, slots=True)
class Heard:
    """A later message of a node."""

    stream: int
    message: wire.NodeMessage


@dataclass(frozen=True, slots=True)
class StreamClosed:
    stream: int
    reason: str


@dataclass(frozen=True, slots=True)
class Rejected:
    """What came on this stream cannot be taken in: its sender is refused, by this sentence."""

    stream: int
    sentence: str


@dataclass(frozen=True, slots=True)
class Planned:
    """The answer to the PlanWanted of this number. A string says why no plan is possible; ``hopeless``: with any nodes."""

    number: int
    outcome: PlanChosen | str
    hopeless: bool = False


@dataclass(frozen=True, slots=True)
class ManifestDone:
    """The answer to WriteManifest. ``problem`` is empty if the checkpoint is whole; ``digest`` is then the BLAKE3 (hex) of the
    manifest. ``bucket``: whose file is to blame, if one is."""

    step: int
    problem: str
    digest: str = ""
    bucket: int | None = None


Request = (
    wire.InviteRequest
    | wire.EnrolRequest
    | wire.RevokeRequest
    | wire.ExpelRequest
    | wire.ForgiveRequest
    | wire.SteerRequest
    | wire.PlanNowRequest
)
"""What people ask about members and the run. A new plan comes, or not, once the planner has looked for one."""


@dataclass(frozen=True, slots=True)
class Asked:
    """``by`` asks for something; somebody without a name yet may enrol. The answer goes to ``ticket``. ``at``: in seconds since
    1970. ``invitation``: the id, and the digest of the secret, of one that is to be made."""

    ticket: int
    request: Request
    by: str
    at: float
    invitation: tuple[str, str] = ("", "")


@dataclass(frozen=True, slots=True)
class TimePassed:
    pass


@dataclass(frozen=True, slots=True)
class StopAsked:
    """This process is to end."""

    reason: str


Input = Greeted | Heard | StreamClosed | Rejected | Planned | ManifestDone | Asked | TimePassed | StopAsked

# Commands, to be carried out in order.


@dataclass(frozen=True, slots=True)
class Send:
    stream: int
    message: wire.CoordinatorMessage


@dataclass(frozen=True, slots=True)
class Certify:
    """Send ``node`` a new certificate, with the ``welcome`` if it has just come."""

    stream: int
    node: str
    welcome: wire.Welcome | None = None


@dataclass(frozen=True, slots=True)
class HangUp:
    """End the stream after everything that was sent on it."""

    stream: int


@dataclass(frozen=True, slots=True)
class CarryOn:
    """Whether the plan that trained until now can be carried on with the nodes of this cluster: without its nodes that are
    gone, but with those that want to leave. ``cluster`` as in PlanWanted; ``holders``: by layer, who holds its state."""

    cluster: Callable[[], Cluster]
    holders: tuple[frozenset[str], ...]


@dataclass(frozen=True, slots=True)
class PlanWanted:
    """Ask the planner. ``cluster`` makes the cluster that the nodes have measured: of many nodes that takes longer than a tick
    may. ``overhead``: see Training; ``horizon``: see plan/planner_input.py; both in seconds. ``seconds``: the planner's time.
    ``carry_on``: what is asked before; None: nothing is. ``lengths``: of rounds (0: none), from which the planner is to
    choose, first that in force. ``islands``: see Training. ``uncertainty``: another plan must save more than this fraction of a
    step (plan/drift.py)."""

    number: int
    cluster: Callable[[], Cluster]
    workload: Workload
    incumbent: Plan | None
    stages: int | tuple[int, ...] | None
    seed: int
    generation: int
    overhead: float
    horizon: float
    seconds: float
    carry_on: CarryOn | None = None
    lengths: tuple[int, ...] = (0,)
    islands: Mapping[str, int] = field(default_factory=dict)
    uncertainty: float = 0.0


@dataclass(frozen=True, slots=True)
class WriteManifest:
    """All ``files`` of a checkpoint, in order of bucket, are in the folder ``gathered``: check them, write the manifest there,
    and rename the folder to ``folder``."""

    step: int
    folder: str
    gathered: str
    files: tuple[CheckpointFile, ...]


@dataclass(frozen=True, slots=True)
class TidyCheckpoints:
    """The checkpoint of ``newest`` is the last whole one in the log (0: there is none): of the run's whole ones up to it, the
    ``keep`` last stay. What there is of those ``given_up`` goes with the others, those ``under_way`` stay."""

    uri: str
    run_id: str
    newest: int
    keep: int
    under_way: frozenset[int]
    given_up: frozenset[int]


Granted = wire.PlanNowReply | wire.InviteReply | wire.EnrolReply | wire.Done


@dataclass(frozen=True, slots=True)
class Answer:
    """To Asked."""

    ticket: int
    reply: Granted | Refused


@dataclass(frozen=True, slots=True)
class Log:
    """A log line for the operator; not an event."""

    sentence: str


Command = Send | Certify | HangUp | PlanWanted | WriteManifest | TidyCheckpoints | Answer | Log


@dataclass(frozen=True, slots=True)
class Ready:
    """What a tick wants done: first ``entries`` go into the log in one durable write, then ``commands`` are carried out in
    order. Nobody hears of an event before it is in the log (like the Ready of etcd's raft)."""

    entries: tuple[Event, ...]
    commands: tuple[Command, ...]


class Transition:
    """The state as it becomes in one tick, with the entries and commands so far. Lives for one call of ``tick``."""

    def __init__(self, state: State, now: float) -> None:
        self.before = state
        self.state = state
        self.now = now
        self.entries: list[Event] = []
        self.commands: list[Command] = []
        self.findings: list[Finding] = []  # those that are not carried out yet

    def emit(self, event: Event) -> None:
        """Adds the event to the log, and what follows from it to the ledger."""
        self.state = replace(self.state, ledger=event.apply(self.state.ledger))
        self.entries.append(event)

    def find(self, finding: Finding) -> None:
        """Leaves a finding for act.py, which carries it out."""
        self.findings.append(finding)

    def enter(self, phase: Phase) -> None:
        """Begins a phase: the only way in."""
        before = type(self.state.phase)
        assert type(phase) in FOLLOWS[before], f"{before.__name__} is not followed by {type(phase).__name__}"
        self.state = replace(self.state, phase=phase)

    def set_phase(self, phase: Phase) -> None:
        """What the phase says of itself has changed. Another one begins by `enter`."""
        assert type(phase) is type(self.state.phase)
        self.state = replace(self.state, phase=phase)

    def set_run(self, run: RunFile) -> None:
        """The run is changed, as an event says."""
        self.state = replace(self.state, run=run, message=run.message(self.state.ledger.run_id))

    def set_members(self, members: Members) -> None:
        self.state = replace(self.state, members=members)

    def set_session(self, session: Session) -> None:
        self.set_members(self.state.members.with_session(session))

    def set_planner(self, planner: Planner) -> None:
        self.state = replace(self.state, planner=planner)

    def set_safekeeping(self, safekeeping: Safekeeping) -> None:
        self.state = replace(self.state, safekeeping=safekeeping)

    def log(self, sentence: str) -> None:
        self.commands.append(Log(sentence))

    def send(self, nodes: Iterable[str], message: wire.CoordinatorMessage) -> None:
        """To each of the nodes that has a session, in order of name."""
        sessions = self.state.members.sessions
        self.commands.extend(Send(sessions[node].stream, message) for node in sorted(set(nodes) & sessions.keys()))

    def answer(self, tickets: Iterable[int], changed: bool, reason: str) -> None:
        """Answers those who asked for a new plan. A change comes under the next generation, with the next commit."""
        generation = self.state.ledger.training.generation + changed
        reply = wire.PlanNowReply(changed=changed, generation=generation, reason=reason)
        self.commands.extend(Answer(ticket, reply) for ticket in tickets)

    def end_question(self, planner: Planner, changed: bool, reason: str) -> None:
        """The planner is as given from now on, but at work on nothing. Who waits for its answer hears this."""
        self.answer(planner.asked.tickets if planner.asked else (), changed, reason)
        self.set_planner(replace(planner, asked=None))

    def refuse(self, stream: int, node: str, reason: wire.RefusalReason, sentence: str) -> None:
        """Ends the stream. This leaves no entry unless it is a member's, so that nobody else fills the log with refusals."""
        name = wire.RefusalReason.Name(reason)
        self.log(f"refused {node or 'a stranger'}: {name}: {sentence}")
        if self.state.members.session_of(stream) is not None:
            self.emit(NodeRefused(node, name, sentence))
        refusal = wire.Refusal(reason=reason, sentence=sentence)
        self.commands += [Send(stream, wire.CoordinatorMessage(refusal=refusal)), HangUp(stream)]
