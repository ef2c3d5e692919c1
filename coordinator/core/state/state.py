"""The state of a tick: the ledger, the phase, and one value for each part of the core that remembers something.

The ledger is the fold of the log and outlives this process. Everything else here lives as long as the process does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from dtfm.coordinator.core.audits import Auditing
from dtfm.coordinator.core.phases import Phase, Stepping
from dtfm.coordinator.core.state.copies import Safekeeping
from dtfm.coordinator.core.state.measured import Norms, Speeds, StageKey
from dtfm.coordinator.core.state.members import Members
from dtfm.coordinator.core.state.planner import Planner
from dtfm.coordinator.core.timeouts import PATIENCE_LEASES
from dtfm.coordinator.log.ledger import Ledger
from dtfm.protos import plan_pb2
from dtfm.protos.run_file.run_file import RunFile
from dtfm.protos.source_files import Files
from dtfm.scheduler.model.rounds import Rounds

ATTEMPTS = 3
"""A party may fail in this number of attempts, at steps or at plans."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An evaluation after ``step`` that is not finished. ``chains``: the held_out_chains, by micro-batch. ``reports``: by last
    node of a chain, the mean loss of each micro-batch that ended there."""

    step: int
    generation: int
    chains: tuple[tuple[str, ...], ...]
    reports: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def expected(self) -> Mapping[str, tuple[int, ...]]:
        """By node that reports losses, the numbers of its micro-batches."""
        numbers: dict[str, list[int]] = {}
        for number, chain in enumerate(self.chains):
            numbers.setdefault(chain[-1], []).append(number)
        return {end: tuple(own) for end, own in numbers.items()}


@dataclass(frozen=True, slots=True)
class Texts:
    """The texts that a node has been asked for, or that cannot be written."""

    node: str = ""
    """The node; empty: no texts are awaited."""
    step: int = 0
    """The step after which it was asked."""
    prompts: tuple[str, ...] = ()
    said_of: int = 0
    """The last plan, by its generation, under which the log has said that no node can write; 0: none."""


@dataclass(frozen=True, slots=True)
class State:
    """All that the coordinator knows: the ledger, and what this process remembers beside the ledger."""

    run: RunFile
    """The run file."""
    message: plan_pb2.Run
    """The run as nodes are told."""
    ledger: Ledger
    """The fold of the log."""
    phase: Phase
    """The phase of training."""
    secret: bytes = field(repr=False)
    """32 random bytes of this process, so that nobody can foresee which work is audited."""
    members: Members = field(default_factory=Members)
    """The connected nodes."""
    planner: Planner = field(default_factory=Planner)
    """The planner's question and answer, and the chosen plan."""
    evaluation: Evaluation | None = None
    """The unfinished evaluation, if there is one."""
    texts: Texts = field(default_factory=Texts)
    """The texts after the last evaluations."""
    safekeeping: Safekeeping = field(default_factory=Safekeeping)
    """Standbys, snapshots and checkpoints."""
    speeds: Mapping[tuple[str, str], Speeds] = field(default_factory=dict)
    """Keys: (node, "") for devices; (source, destination) for links; (node, node) for the fraction of its claimed speed that a
    node delivers (plan/drift.py)."""
    auditing: Auditing = field(default_factory=Auditing)
    """What is remembered between audits."""
    norms: Mapping[StageKey, Norms] = field(default_factory=dict)
    """The last gradient norms of each stage of the plan (step/norms.py)."""
    overdue: int | None = None
    """The last step that passed its deadline and may resume with the work done so far (plan/adoption.py), if there was one."""
    stalled: int | None = None
    """The run's number of commits when a deadline passed last; None: none has."""
    own_files: Files = ()
    """The coordinator's own copies of the data's files; empty: it has none, or has not read them yet."""
    disk_bytes: float = math.inf
    """Bytes free on the coordinator's own disk when this process started."""
    exit_code: int | None = None
    """The exit code of this process when it has ``stopped``; from then on only farewells are sent. None: it runs."""

    def afresh(self) -> State:
        """The state as after a restart, but with the connected nodes: forgets what this process remembers beside the ledger."""
        kept = self.safekeeping
        return replace(
            self,
            planner=Planner(number=self.planner.number),
            evaluation=None,
            texts=Texts(),
            safekeeping=Safekeeping(standby_number=kept.standby_number, unfinished=kept.unfinished),
            speeds={},
            norms={},
            auditing=Auditing(self.auditing.number),
            overdue=None,
            stalled=None,
        )

    @property
    def has_stalled(self) -> bool:
        """Whether a deadline has passed since the last commit."""
        return self.stalled == self.ledger.trust.commits

    @property
    def stopped(self) -> bool:
        return self.exit_code is not None

    @property
    def is_complete(self) -> bool:
        """Whether the run is over, and not because it failed."""
        return self.ledger.outcome is not None and self.ledger.outcome.completed

    @property
    def is_closing(self) -> bool:
        """Whether no step follows the last committed step: all steps are trained, or the run is to stop."""
        hold, step = self.ledger.hold, self.ledger.training.step
        ends = step >= self.last_step or (hold is not None and hold.ends)
        return ends and self.rounds.at_rest(step)

    @property
    def last_step(self) -> int:
        """The step after which the run ends, if its rounds stay: train.steps, or fewer if the batch has grown."""
        return self.rounds.end(self.run.train.steps)

    @property
    def rounds(self) -> Rounds:
        return self.ledger.training.rounds

    @property
    def lease(self) -> float:
        return self.run.cluster.lease

    @property
    def patience(self) -> float:
        """The seconds that copies of the state and checkpoints may take beside the steps."""
        return self.lease * PATIENCE_LEASES

    @property
    def wakes_at(self) -> float | None:
        """When a tick is due even if nothing happens until then; None: not before the next beat."""
        if not isinstance(self.phase, Stepping):
            return None
        due = (request.until for audit in self.phase.audits for request in audit.awaited.values())
        return min(due, default=self.phase.commit_by)
