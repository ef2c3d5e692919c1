"""What goes into a tick and what comes out of it, and the scratch pad that a tick writes on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from dtfm.coordinator.core.state import CheckpointTally, PlanChosen, Session, State
from dtfm.coordinator.log.events import Event, NodeRefused
from dtfm.coordinator.log.ledger import apply
from dtfm.protos import control_pb2 as wire
from dtfm.scheduler.model.cluster import Cluster
from dtfm.scheduler.model.plan import Plan
from dtfm.scheduler.model.workload import Workload

# What goes in.


@dataclass(frozen=True, slots=True)
class Greeted:
    """A stream's first message; ``shows_token``: whether its metadata do."""

    stream: int
    message: wire.NodeMessage
    shows_token: bool


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
class Planned:
    """Answer to PlanWanted of this number; a string says why no plan is possible, ``hopeless``: with no nodes at all."""

    number: int
    outcome: PlanChosen | str
    hopeless: bool = False


@dataclass(frozen=True, slots=True)
class ManifestDone:
    """Answer to WriteManifest; ``problem`` is empty when the checkpoint is whole."""

    step: int
    problem: str


@dataclass(frozen=True, slots=True)
class PlanNow:
    """Somebody asks to plan anew; the answer goes to ``ticket``."""

    ticket: int


@dataclass(frozen=True, slots=True)
class TimePassed:
    pass


@dataclass(frozen=True, slots=True)
class StopAsked:
    """``dismiss``: the nodes are to stop too; else they are to come back to the next coordinator process."""

    reason: str
    dismiss: bool


Input = Greeted | Heard | StreamClosed | Planned | ManifestDone | PlanNow | TimePassed | StopAsked

# What comes out, to be done in this order.


@dataclass(frozen=True, slots=True)
class Append:
    """To the log, durably, before anything after it is done."""

    event: Event


@dataclass(frozen=True, slots=True)
class Send:
    stream: int
    message: wire.CoordinatorMessage


@dataclass(frozen=True, slots=True)
class Admit:
    """Certify ``node`` by its signing request, and send it the welcome with its certificate."""

    stream: int
    node: str
    request: bytes
    welcome: wire.Welcome


@dataclass(frozen=True, slots=True)
class HangUp:
    """End the stream once all that was sent on it has gone out."""

    stream: int


@dataclass(frozen=True, slots=True)
class PlanWanted:
    number: int
    cluster: Cluster
    workload: Workload
    incumbent: Plan | None
    stages: int | tuple[int, ...] | None
    seed: int
    generation: int
    seconds: float


@dataclass(frozen=True, slots=True)
class WriteManifest:
    """All buckets are said to be there: check that, then write the manifest."""

    step: int
    tally: CheckpointTally


@dataclass(frozen=True, slots=True)
class AnswerPlanNow:
    ticket: int
    changed: bool
    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Log:
    """A line for the operator that is no event."""

    sentence: str


@dataclass(frozen=True, slots=True)
class Stop:
    """The run is over, or was told to stop."""

    exit_code: int


Command = Append | Send | Admit | HangUp | PlanWanted | WriteManifest | AnswerPlanNow | Log | Stop


class Turn:
    """One tick's scratch pad: the state as it becomes, and the commands so far. Lives for one call of ``tick``."""

    def __init__(self, state: State, now: float) -> None:
        self.state = state
        self.now = now
        self.commands: list[Command] = []

    def set(self, **changes: Any) -> None:
        self.state = replace(self.state, **changes)

    def emit(self, event: Event) -> None:
        self.state = replace(self.state, ledger=apply(self.state.ledger, event))
        self.commands.append(Append(event))

    def log(self, sentence: str) -> None:
        self.commands.append(Log(sentence))

    def send(self, nodes: Iterable[str], **message: Any) -> None:
        """To each node that has a session, in order of name."""
        out = wire.CoordinatorMessage(**message)
        for node in sorted(set(nodes) & self.state.sessions.keys()):
            self.commands.append(Send(self.state.sessions[node].stream, out))

    def update(self, session: Session, **changes: Any) -> None:
        changed = replace(session, **changes)
        self.set(sessions={**self.state.sessions, session.node: changed})

    def refuse(self, stream: int, node: str, reason: wire.RefusalReason, sentence: str) -> None:
        """The stream ends. Strangers without the token leave no trace in the log, so that they cannot fill it."""
        name = wire.RefusalReason.Name(reason)
        self.log(f"refused {node or 'a stranger'}: {name}: {sentence}")
        if reason not in (wire.TOKEN, wire.MALFORMED) or node in self.state.sessions:
            self.emit(NodeRefused(node, name, sentence))
        self.commands.append(
            Send(stream, wire.CoordinatorMessage(refusal=wire.Refusal(reason=reason, sentence=sentence)))
        )
        self.commands.append(HangUp(stream))
