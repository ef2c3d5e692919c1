"""One tick: its inputs, its commands, and the state as the tick changes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from dtfm.coordinator.core.findings import Finding
from dtfm.coordinator.core.phases import FOLLOWS, Phase
from dtfm.coordinator.core.refusal import Refused
from dtfm.coordinator.core.state.copies import Safekeeping
from dtfm.coordinator.core.state.members import Members
from dtfm.coordinator.core.state.planner import PlanChosen, Planner
from dtfm.coordinator.core.state.session import Session
from dtfm.coordinator.core.state.state import State
from dtfm.coordinator.log.events import CheckpointFile, Event, NodeRefused
from dtfm.protos import control_pb2 as wire
from dtfm.protos.run_file.run_file import RunFile
from dtfm.protos.source_files import Files
from dtfm.scheduler.model.cluster import Cluster
from dtfm.scheduler.model.plan import Plan
from dtfm.scheduler.model.workload import Workload

# Inputs.


@dataclass(frozen=True, slots=True)
class Greeted:
    """The first message of a stream. ``caller``: the name that belongs to the caller's key. ``seen``: the IP address of the
    caller; empty: not known, or not a node's."""

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
    """A message on this stream cannot be taken in. Its sender is refused, with this sentence."""

    stream: int
    sentence: str


@dataclass(frozen=True, slots=True)
class Planned:
    """The answer to the PlanWanted of this number. A string says why no plan is possible. ``hopeless``: no nodes could help."""

    number: int
    outcome: PlanChosen | str
    hopeless: bool = False


@dataclass(frozen=True, slots=True)
class ManifestDone:
    """The answer to WriteManifest. ``problem`` is empty if the checkpoint is whole; then ``digest`` is the BLAKE3 (hex) of the
    manifest. ``bucket``: the bucket whose file is to blame; None: no single file is."""

    step: int
    problem: str
    digest: str = ""
    bucket: int | None = None


@dataclass(frozen=True, slots=True)
class OwnFilesRead:
    """The coordinator has described its own copies of the data's files."""

    files: Files


Request = (
    wire.InviteRequest
    | wire.EnrolRequest
    | wire.RevokeRequest
    | wire.ExpelRequest
    | wire.ForgiveRequest
    | wire.SteerRequest
    | wire.PlanNowRequest
)
"""People's requests about members and the run. The answer to a request for a plan comes when the planner has looked for one."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request by ``by``; a caller without a name may only enrol. The answer goes to ``ticket``. ``at``: seconds since 1970.
    ``invitation``: for a new invitation, its id and the digest of its secret."""

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
    """This process should end."""

    reason: str


Input = (
    Greeted | Heard | StreamClosed | Rejected | Planned | ManifestDone | OwnFilesRead | Asked | TimePassed | StopAsked
)

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
    """A question before planning: can the last plan be carried on with the nodes of this cluster? They are its nodes that are
    still here, including nodes that want to leave. ``cluster``: as in PlanWanted, with the node first that was heard last.
    ``holders``: by layer, the holders of its state."""

    cluster: Callable[[], Cluster]
    holders: tuple[frozenset[str], ...]


@dataclass(frozen=True, slots=True)
class PlanWanted:
    """Asks the planner."""

    number: int
    """The question's number."""
    cluster: Callable[[], Cluster]
    """Makes the cluster from the measurements. With many nodes that takes longer than a tick may."""
    workload: Workload
    """The model as the scheduler sees it."""
    incumbent: Plan | None
    """The plan in force; None: there is no plan yet."""
    stages: int | tuple[int, ...] | None
    """As the run file pins them (cluster.pinned); None: not pinned."""
    seed: int
    """The run's seed."""
    generation: int
    """The generation of the plan that is wanted."""
    overhead: float
    """Seconds, see Training."""
    horizon: float
    """Seconds, see plan/planner_input.py."""
    seconds: float
    """The planner's time."""
    carry_on: CarryOn | None = None
    """The question to ask first, if there is one."""
    lengths: tuple[int, ...] = (0,)
    """The lengths of rounds that the planner chooses from (0: no rounds), the length in force first."""
    islands: Mapping[str, int] = field(default_factory=dict)
    """See Training."""
    uncertainty: float = 0.0
    """Another plan must save more than this fraction of a step (plan/drift.py)."""
    steps_left: int = 0
    """The steps that an island could train in this round if it began soon; 0: islands begin at an exchange alone."""
    batches: int | None = 1
    """The batches of the run file in a step with rounds; None: as many as there are islands."""


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
    """Deletes checkpoints. ``newest``: the step of the last whole one in the log; 0: no checkpoint. Of the run's whole
    checkpoints up to ``newest``, the ``keep`` last stay. Those ``given_up`` are deleted too; those ``under_way`` stay."""

    uri: str
    run_id: str
    newest: int
    keep: int
    under_way: frozenset[int]
    given_up: frozenset[int]


Granted = wire.PlanNowReply | wire.InviteReply | wire.EnrolReply | wire.Done


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to an Asked."""

    ticket: int
    reply: Granted | Refused


@dataclass(frozen=True, slots=True)
class Log:
    """A log line for the operator; not an event."""

    sentence: str


Command = Send | Certify | HangUp | PlanWanted | WriteManifest | TidyCheckpoints | Answer | Log


@dataclass(frozen=True, slots=True)
class Ready:
    """The results of a tick. First ``entries`` go into the log in one durable write, then ``commands`` are carried out in order.
    Nobody hears of an event before it is in the log (like the Ready of etcd's raft)."""

    entries: tuple[Event, ...]
    commands: tuple[Command, ...]


class Transition:
    """The state as it changes in one tick, with the entries and commands so far. Lives for one call of ``tick``."""

    def __init__(self, state: State, now: float) -> None:
        self.before = state
        self.state = state
        self.now = now
        self.entries: list[Event] = []
        self.commands: list[Command] = []
        self.findings: list[Finding] = []  # not carried out yet

    def emit(self, event: Event) -> None:
        """Adds the event to the log, and its effect to the ledger."""
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
        """Changes values of the phase. `enter` begins another phase."""
        assert type(phase) is type(self.state.phase)
        self.state = replace(self.state, phase=phase)

    def set_run(self, run: RunFile) -> None:
        """Changes the run, as an event says."""
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
        """Sends the message to each of the nodes that has a session, in order of name."""
        sessions = self.state.members.sessions
        self.commands.extend(Send(sessions[node].stream, message) for node in sorted(set(nodes) & sessions.keys()))

    def answer(self, tickets: Iterable[int], changed: bool, reason: str) -> None:
        """Answers the requests for a new plan. A change comes under the next generation, with the next commit."""
        generation = self.state.ledger.training.generation + changed
        reply = wire.PlanNowReply(changed=changed, generation=generation, reason=reason)
        self.commands.extend(Answer(ticket, reply) for ticket in tickets)

    def end_question(self, planner: Planner, changed: bool, reason: str) -> None:
        """Replaces the planner, and ends its question. Callers that wait for an answer get this one."""
        self.answer(planner.asked.tickets if planner.asked else (), changed, reason)
        self.set_planner(replace(planner, asked=None))

    def refuse(self, stream: int, node: str, reason: wire.RefusalReason, sentence: str) -> None:
        """Ends the stream. Logs an event only if it is a member's, so that strangers cannot fill the log with refusals."""
        name = wire.RefusalReason.Name(reason)
        self.log(f"refused {node or 'a stranger'}: {name}: {sentence}")
        if self.state.members.session_of(stream) is not None:
            self.emit(NodeRefused(node, name, sentence))
        refusal = wire.Refusal(reason=reason, sentence=sentence)
        self.commands += [Send(stream, wire.CoordinatorMessage(refusal=refusal)), HangUp(stream)]
